"""How well meha.cleaning.clean finds wrong labels, beside the same network trained on the trusted examples alone, and on all.

    python -m meha_lab.tools.clean [--digits]

A line for each setting: data, share or number of trusted examples, noise; then for each way the area under the ROC curve of its
ranking, and precision and recall of the labels with a weight below one half. Labels are changed to any other, or ("next") to
the next one, as confusable classes are. Mean over three seeds; one for MNIST and FashionMNIST, which need MEHA_DATA.
"""

import argparse
import warnings

import meha_lab.datasets
import numpy as np
import torch
from sklearn import datasets
from sklearn.metrics import roc_auc_score
from torch.nn.functional import cross_entropy

from meha.cleaning import clean
from meha.cleaning import network as inside


def images(name):
    found = meha_lab.datasets.load(name, "train")
    chosen = np.random.RandomState(0).permutation(60_000)[:5500]
    return found.images[chosen].flatten(1).numpy(), found.labels[chosen].numpy()


DATA = {
    "digits": lambda: (lambda d: (d.images.flatten(1).numpy(), d.labels.numpy()))(meha_lab.datasets.digits()),
    "mnist": lambda: images("mnist"),
    "fashion": lambda: images("fashion-mnist"),
    "moons": lambda: datasets.make_moons(1000, noise=0.15, random_state=0),
    "blobs": lambda: datasets.make_blobs(1000, centers=5, cluster_std=1.5, random_state=3),
    "circles": lambda: datasets.make_circles(1000, noise=0.1, factor=0.5, random_state=0),
    "classes": lambda: datasets.make_classification(2000, 20, n_informative=8, n_classes=4, random_state=0),
    "cancer": lambda: datasets.load_breast_cancer(return_X_y=True),
    "wine": lambda: datasets.load_wine(return_X_y=True),
    "iris": lambda: datasets.load_iris(return_X_y=True),
}
DIGITS = [("digits", trusted, noise, "any") for trusted in (0.05, 0.1, 0.3) for noise in (0.1, 0.3, 0.5)]
OTHERS = [
    ("digits", 0.1, 0.3, "next"),
    *[(name, 0.05, noise, "any") for name, noise in (("moons", 0.3), ("blobs", 0.3), ("circles", 0.2), ("classes", 0.3))],
    *[("cancer", trusted, noise, "any") for trusted, noise in ((0.1, 0.1), (0.1, 0.3), (0.05, 0.2))],
    *[("wine", 0.2, 0.3, "any"), ("iris", 0.2, 0.2, "any")],
    *[("mnist", 500, noise, "any") for noise in (0.1, 0.3, 0.5)],
    *[("mnist", 100, 0.5, "any"), ("mnist", 200, 0.3, "next"), ("fashion", 500, 0.3, "any"), ("fashion", 200, 0.3, "next")],
]


def spoiled(name, trusted, noise, kind, seed):
    """Features, labels of which some are wrong, which are trusted, and the true labels; the trusted ones come first."""
    features, truth = DATA[name]()
    random = np.random.RandomState(seed)
    order = random.permutation(len(truth))
    features, truth = features[order], truth[order]
    known = np.arange(len(truth)) < (trusted if trusted >= 1 else round(trusted * len(truth)))
    shift = random.randint(1, truth.max() + 1, len(truth)) if kind == "any" else 1
    wrong = ~known & (random.rand(len(truth)) < noise)
    return features, np.where(wrong, (truth + shift) % (truth.max() + 1), truth), known, truth


def simply(features, labels, rows, seed):
    """Weights from the same network after 500 steps of Adam on some rows."""
    inputs = torch.from_numpy(inside._scaled(np.asarray(features)))
    names, numbers = np.unique(labels, return_inverse=True)
    targets, rows = torch.from_numpy(numbers), torch.from_numpy(rows)
    torch.manual_seed(seed)
    network = inside._network(inputs.shape[1], len(names), seed)
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
    batches = inside._batches(len(rows), torch.Generator().manual_seed(seed), inputs.device)
    for _ in range(500):
        chosen = rows[next(batches)]
        optimizer.zero_grad()
        cross_entropy(network(inputs[chosen]), targets[chosen]).backward()
        optimizer.step()
    network.eval()
    with torch.no_grad():
        scores = network(inputs).double()
    own = scores.gather(1, targets[:, None])
    best = scores.scatter(1, targets[:, None], -torch.inf).amax(dim=1, keepdim=True)
    return (own - best).squeeze(1).sigmoid().numpy()


def judged(weights, wrong):
    """Area, precision and recall."""
    flagged = weights < 0.5
    right = (flagged & wrong).sum()
    return roc_auc_score(wrong, -weights), right / max(flagged.sum(), 1), right / wrong.sum()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--digits", action="store_true", help="the nine settings of digits only")
    warnings.simplefilter("ignore")
    print(f"{'data':8} trusted noise  {'MEHA':16} {'trusted':16} {'all':16}")
    for name, trusted, noise, kind in DIGITS if parser.parse_args().digits else DIGITS + OTHERS:
        rows = []
        for seed in (10,) if name in ("mnist", "fashion") else (10, 11, 12):
            features, labels, known, truth = spoiled(name, trusted, noise, kind, seed)
            wrong = (labels != truth)[~known]
            found = [clean(features, labels, known, seed=seed).weights]
            found += [simply(features, labels, some, seed) for some in (np.flatnonzero(known), np.arange(len(labels)))]
            rows.append([number for weights in found for number in judged(weights[~known], wrong)])
        means = np.mean(rows, axis=0)
        shown = "  ".join(f"{a:.3f} {p:.2f} {r:.2f}" for a, p, r in means.reshape(3, 3))
        print(f"{name:8} {trusted:<7} {noise:.1f} {'next' if kind == 'next' else ''}   {shown}", flush=True)


if __name__ == "__main__":
    main()
