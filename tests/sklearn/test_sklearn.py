"""Estimators: scikit-learn's own checks, its tools, weights, groups, losses, wrong labels, covariate shift, errors."""

import pickle
from inspect import signature

import numpy as np
import pytest

pytest.importorskip("sklearn")

from scipy.sparse import csr_matrix
from sklearn.base import clone
from sklearn.linear_model import LassoCV, LogisticRegression, Ridge
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator

from meha.sklearn import ExampleReweighter, LabelCleaner, PenalizedClassifier, PenalizedRegressor, _search
from meha.sklearn._base import WAYS, ways
from meha.sklearn._labels import true_classes

ESTIMATORS = [ExampleReweighter, LabelCleaner, PenalizedClassifier, PenalizedRegressor]
QUIET = {"on_skip": None} if "on_skip" in signature(check_estimator).parameters else {}


def regression(seed=0, n=60, p=12, noise=0.5):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, p))
    return X, 2 * X[:, 0] - X[:, 1] + noise * rng.normal(size=n) + 3


def classification(seed=0, n=90, classes=2):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, 6))
    score = 2 * X[:, 0] + 0.5 * rng.normal(size=n)
    return X, np.digitize(score, np.quantile(score, np.linspace(0, 1, classes + 1)[1:-1]))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ESTIMATORS, ids=lambda kind: kind.__name__)
def test_scikit_learn_accepts_the_estimators(kind):
    """The quickest of them is also checked in the short run, below."""
    check_estimator(kind(), **QUIET)


@pytest.mark.filterwarnings("ignore")
def test_scikit_learn_accepts_the_quickest():
    check_estimator(ExampleReweighter(), **QUIET)


def test_a_single_weight_is_that_of_scikit_learn():
    """At the weight that was chosen, the fits of Lasso and Ridge are ours."""
    from sklearn.linear_model import Lasso

    X, y = regression()
    Z = StandardScaler().fit_transform(X)
    for penalty in ("lasso", "ridge"):
        model = PenalizedRegressor(penalty=penalty, weights="one").fit(X, y)
        w = model.penalties_[0]
        assert (model.penalties_ == w).all()
        # absolute values are in units of the targets, squares are not
        other = Lasso(alpha=w * y.std(), tol=1e-12, max_iter=100_000) if penalty == "lasso" else Ridge(alpha=w * len(y))
        np.testing.assert_allclose(model.predict(X), other.fit(Z, y).predict(Z), atol=1e-5)


def test_errors_are_better_than_those_of_the_lasso_where_the_truth_is_sparse():
    """On the mean of five draws, 80 examples of 150 features of which two matter."""
    errors = {PenalizedRegressor: [], LassoCV: []}
    for seed in range(0, 10, 2):
        (X, y), (X_test, y_test) = (regression(seed + i, n, 150, 1.0) for i, n in enumerate((80, 500)))
        for kind, found in errors.items():
            found.append(np.mean((kind().fit(X, y).predict(X_test) - y_test) ** 2))
    assert np.mean(errors[PenalizedRegressor]) < 0.98 * np.mean(errors[LassoCV])


def test_weights_count_as_copies_and_order_does_not_matter():
    X, y = regression(n=30, p=4)
    counts = np.random.default_rng(1).integers(0, 3, size=30)
    weighted = PenalizedRegressor().fit(X, y, sample_weight=counts)
    rows = np.random.default_rng(2).permutation(np.repeat(np.arange(30), counts))
    np.testing.assert_allclose(weighted.coef_, PenalizedRegressor().fit(X[rows], y[rows]).coef_, atol=1e-7)


def test_the_intercept_and_units_do_not_matter():
    X, y = regression()
    model = PenalizedRegressor().fit(X, y)
    other = PenalizedRegressor().fit(1e3 * X + 5, 1e-4 * y - 7)
    np.testing.assert_allclose(other.predict(1e3 * X + 5), 1e-4 * model.predict(X) - 7, atol=1e-9)
    bare = PenalizedRegressor(fit_intercept=False).fit(X, y)
    assert bare.intercept_ == 0
    np.testing.assert_allclose(bare.predict(np.zeros((1, X.shape[1]))), 0)


def test_groups_get_weights():
    rng = np.random.default_rng(0)
    X, groups = rng.normal(size=(80, 30)), np.repeat(["signal", "rest", "noise"], 10)
    y = X[:, :10] @ rng.normal(size=10) + rng.normal(size=80)
    model = PenalizedRegressor(penalty="ridge", groups=groups).fit(X, y)
    weights = {group: set(model.penalties_[groups == group]) for group in set(groups)}
    assert all(len(values) == 1 for values in weights.values())
    assert max(weights["signal"]) < min(weights["rest"] | weights["noise"])
    sparse = PenalizedRegressor(penalty="sparse-group", groups=groups, weights="one").fit(X, y)
    assert sparse.penalty_ == "sparse group lasso"


def test_huber_resists_outliers():
    X, y = regression(n=100)
    spoiled = y.copy()
    spoiled[:8] += 60
    truth = 2 * X[:, 0] - X[:, 1] + 3
    errors = {
        loss: np.mean((PenalizedRegressor(loss=loss).fit(X, spoiled).predict(X) - truth) ** 2) for loss in ("squared", "huber")
    }
    assert errors["huber"] < 0.2 * errors["squared"]


@pytest.mark.parametrize("classes", [2, 3])
def test_classifiers_predict(classes):
    X, y = classification(classes=classes)
    names = np.array(["no", "yes", "perhaps"])[y]
    model = PenalizedClassifier(penalty="lasso", weights="one").fit(X, names)
    assert model.score(X, names) > 0.85
    np.testing.assert_allclose(model.predict_proba(X).sum(axis=1), 1)
    assert model.coef_.shape == ((1, 6) if classes == 2 else (3, 6))
    assert (model.classes_[model.predict_proba(X).argmax(axis=1)] == model.predict(X)).all()


def test_separable_classes_do_not_make_the_model_too_sure(monkeypatch):
    """Few examples of classes that overlap a little: without an imagined example, the folds believe that they do not."""

    def error(seed):
        rng = np.random.default_rng(seed)
        X = rng.normal(size=(2060, 6))
        y = ((X[:, 0] + X[:, 1] > 0) ^ (rng.uniform(size=len(X)) < 0.03)).astype(int)
        model = PenalizedClassifier().fit(X[:60], y[:60])
        return -np.log(model.predict_proba(X[60:])[np.arange(2000), y[60:]]).mean()

    cautious = [error(seed) for seed in range(8)]
    monkeypatch.setattr(_search, "IMAGINED", 0.0)
    bold = [error(seed) for seed in range(8)]
    assert np.mean(cautious) < 0.8 * np.mean(bold)
    assert max(cautious) < 0.5 < max(bold)


def test_folds_are_dealt_in_several_ways():
    strata = np.arange(40) % 2
    folds = ways(strata, 5, seed=0)
    assert folds.shape == (WAYS, 40)
    assert (folds[0] != folds[1]).any()
    for way in folds:
        assert all(np.bincount(way[strata == kind]).tolist() == [4] * 5 for kind in (0, 1))


def test_tools_of_scikit_learn():
    X, y = regression(n=40, p=5)
    search = GridSearchCV(
        make_pipeline(StandardScaler(), PenalizedRegressor()), {"penalizedregressor__penalty": ["ridge", "lasso"]}, cv=2
    )
    search.fit(X, y)
    model = pickle.loads(pickle.dumps(search.best_estimator_))
    np.testing.assert_array_equal(model.predict(X), search.predict(X))
    np.testing.assert_allclose(clone(model).fit(X, y).predict(X), search.predict(X))


def test_sparse_and_dense_data_give_the_same():
    X, y = regression(n=40, p=5)
    X = np.where(np.abs(X) > 0.8, X, 0.0)
    dense, sparse = PenalizedRegressor().fit(X, y), PenalizedRegressor().fit(csr_matrix(X), y)
    np.testing.assert_allclose(dense.coef_, sparse.coef_)
    np.testing.assert_allclose(sparse.predict(csr_matrix(X)), dense.predict(X))


def test_names_of_columns_and_figures():
    pandas = pytest.importorskip("pandas")
    X, y = regression(n=40, p=3)
    model = PenalizedRegressor().fit(pandas.DataFrame(X, columns=["a", "b", "c"]), y)
    assert list(model.feature_names_in_) == ["a", "b", "c"]


def test_figures_show_weights_and_course():
    from matplotlib.figure import Figure

    X, y = regression(n=40, p=5)
    model = PenalizedRegressor().fit(X, y)
    axes = Figure().subplots(1, 2)
    np.testing.assert_array_equal(model.plot_weights(axes[0]).lines[0].get_ydata(), model.penalties_)
    model.plot_course(axes[1])
    assert len(axes[1].lines) == len(model.cv_results_["candidate"])
    assert model.cv_results_["chosen"].sum() == 1


def test_wrong_labels_are_found_without_and_with_trusted_ones():
    rng = np.random.default_rng(0)
    truth = rng.integers(0, 3, 300)
    X = rng.normal(size=(300, 4)) + 3 * np.eye(3, 4)[truth]
    wrong = rng.uniform(size=300) < 0.25
    y = np.where(wrong, (truth + 1) % 3, truth)
    trusted = np.flatnonzero(~wrong)[:30]
    for cleaner in (
        LabelCleaner().fit(X, y),
        LabelCleaner().fit(X, y, trusted),
        LabelCleaner("network").fit(X, y, trusted),
    ):
        quality = cleaner.label_quality_
        assert quality[~wrong].mean() > quality[wrong].mean() + 0.5
        assert wrong[cleaner.suspects_].mean() > 0.8
        assert (cleaner.suggested_ == truth).mean() > 0.85
        assert (np.diff(quality[cleaner.suspects_]) >= 0).all()
    assert (LabelCleaner(LogisticRegression()).fit(X, y, trusted).label_quality_[trusted] == 1).all()


def test_the_noise_has_a_direction_only_where_labels_give_evidence():
    """Labels of the next class, or of any other: where errors go to the next class, none comes from the one after."""
    rng = np.random.default_rng(0)
    rows, truth, folds = np.arange(800), rng.integers(0, 4, 800), rng.integers(0, 5, 800)
    probabilities = np.eye(4)[truth] * rng.uniform(0.5, 3, (800, 1)) + rng.uniform(0.2, 1, (800, 4))
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    wrong = rng.uniform(size=800) < 0.3
    even, directed = np.where(wrong, (truth + rng.integers(1, 4, 800)) % 4, truth), np.where(wrong, (truth + 1) % 4, truth)
    ratios = {}
    for name, labels in (("even", even), ("directed", directed)):
        classes = true_classes(probabilities, labels, folds)
        after, before = (classes[rows, (labels + step) % 4][~wrong].mean() for step in (1, -1))
        ratios[name] = after / before
        assert (classes.argmax(axis=1) == truth).mean() > (probabilities.argmax(axis=1) == truth).mean()
        assert classes[rows, labels][~wrong].mean() > 0.9
        assert classes[rows, labels][wrong].mean() < 0.2
    assert 0.5 < ratios["even"] < 2
    assert ratios["directed"] < 0.1


def test_trusted_examples_decide_where_half_of_the_labels_are_wrong():
    """With half of each class labelled as the next one, only trusted examples tell which half."""
    rng = np.random.default_rng(0)
    truth = rng.integers(0, 3, 400)
    X = rng.normal(size=(400, 4)) + 3 * np.eye(3, 4)[truth]
    wrong = rng.uniform(size=400) < 0.5
    wrong[:45] = False
    y = np.where(wrong, (truth + 1) % 3, truth)
    cleaner = LabelCleaner().fit(X, y, trusted=np.arange(45))
    found = np.isin(np.arange(400), cleaner.suspects_)
    assert wrong[found].mean() > 0.9
    assert found[wrong].mean() > 0.9
    assert cleaner.score(X, truth) > 0.93


def test_shifted_data_get_weights_and_others_none():
    rng = np.random.default_rng(0)
    X, elsewhere = rng.normal(size=(300, 2)), rng.normal(size=(300, 2)) * 0.5 + [1.5, 0]
    y, y_there = X[:, 0] ** 2, elsewhere[:, 0] ** 2
    shifted = ExampleReweighter().fit(X, y, elsewhere)
    assert shifted.power_ > 0
    assert np.corrcoef(shifted.sample_weight_, X[:, 0])[0, 1] > 0.5
    assert np.mean((shifted.predict(elsewhere) - y_there) ** 2) < 0.3 * np.mean(
        (Ridge().fit(X, y).predict(elsewhere) - y_there) ** 2
    )
    same = ExampleReweighter().fit(X, X[:, 0], rng.normal(size=(300, 2)))
    assert same.power_ == 0
    assert (same.sample_weight_ == 1).all()


def test_errors_name_the_remedy():
    X, y = regression(n=20, p=4)
    for options, message in [
        (dict(penalty="bridge"), "penalty: must be"),
        (dict(weights="many"), "weights: must be"),
        (dict(penalty="group"), "groups: penalty='group' needs"),
        (dict(groups=[0, 1]), "groups: must have a label for each of 4"),
        (dict(penalty="group", weights="feature", groups=[0, 0, 1, 1]), "weights: 'group' has a weight for each group"),
        (dict(folds=1), "folds: must be 2 or more"),
        (dict(l1_ratio=0.0), "l1_ratio: must be"),
        (dict(loss="absolute"), "loss: must be"),
        (dict(loss="huber", epsilon=0.0), "epsilon: must be positive"),
    ]:
        with pytest.raises(ValueError, match=message):
            PenalizedRegressor(**options).fit(X, y)
    with pytest.raises(TypeError, match="estimator: Ridge needs"):
        LabelCleaner(Ridge()).fit(X, y > 3)
    with pytest.raises(ValueError, match="trusted: estimator='network' needs"):
        LabelCleaner("network").fit(X, y > 3)
    with pytest.raises(TypeError, match="estimator: str needs"):
        LabelCleaner("net").fit(X, y > 3)
    with pytest.raises(ValueError, match="sample_weight: must not be negative, got -1"):
        PenalizedRegressor().fit(X, y, sample_weight=np.r_[-1.0, np.ones(19)])
    with pytest.raises(ValueError, match="X_target: has 3 features"):
        ExampleReweighter().fit(X, y, X[:, :3])
