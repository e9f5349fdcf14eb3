"""Damaged checkpoints: a run never goes on from one, and says so in one clear error.

``python tests/running/test_damage.py 400`` counts random changes of files of three kinds of runs. With ``--signed`` the
checksum is made right again, which no accident does: that counts what the checks after it notice.
"""

import collections
import io
import random
import re
import sys
import tempfile
import warnings
import zipfile
from pathlib import Path

import pytest
import torch
from test_checkpoints import changed, network, places

import meha
from meha import Checkpoint
from meha.running.checkpoints import checksum

CLEAR = r"checkpoint: .*(give another path|delete the file)|max_steps: the run in the checkpoint"


def smooth(method):
    problem = meha.problems.strong_convex(n=3)
    return {"problem": problem, "x0": problem.x0, "y0": problem.y0, "method": method}


KINDS = {
    "a network on batches": lambda: network(seed=0),
    "MEHA on tensors": lambda: smooth(meha.MEHA(alpha=0.1, beta=0.1, eta=0.1, gamma=1.0, c=2.0)),
    "the default": lambda: smooth(None),
}


def run(kind, file, steps):
    call = KINDS[kind]()
    return meha.solve(**{**call, "max_steps": steps, "checkpoint": Checkpoint(file, every=2)})


def damage(good, how, rng):
    """The content of a file after a random change of one kind."""
    at = rng.randrange(len(good))
    if how == "cut":
        return good[:at]
    if how == "flipped":
        return good[:at] + bytes([good[at] ^ (1 << rng.randrange(8))]) + good[at + 1 :]
    if how == "overwritten":
        return good[:at] + rng.randbytes(rng.randint(1, 200)) + good[at:]
    content = torch.load(io.BytesIO(good), weights_only=True)
    kept = {name: content.pop(name) for name in ("version", "checksum")}
    content = changed(content, rng.choice(list(places(content))), rng)
    if how == "signed":
        kept["checksum"] = checksum(content)
    file = io.BytesIO()
    torch.save({**kept, **content}, file)
    return file.getvalue()


def outcome(kind, good, content, expected, file):
    """What a call does with a file: "clear", "bare" (an error that does not tell), "same" as without, or "silent"."""
    Path(f"{file}.previous").unlink(missing_ok=True)
    file.write_bytes(content)
    try:
        found = run(kind, file, 6)
    except Exception as error:
        return "clear" if re.match(CLEAR, str(error), re.S) else f"bare: {type(error).__name__}: {error}"[:160]
    equal = all(torch.equal(torch.cat(flat(a)), torch.cat(flat(b))) for a, b in ((found.x, expected.x), (found.y, expected.y)))
    history = all(found.history.get(name) == value for name, value in expected.history.items() if name != "seconds")
    return "same" if equal and history and found.counts == expected.counts and found.steps == expected.steps else "silent"


def flat(value):
    return [part.detach().reshape(-1) for part in (value.state_dict().values() if hasattr(value, "state_dict") else [value])]


def count(changes, ways, folder, seed=0):
    """The outcomes of random changes, the kinds of runs and of changes in turn."""
    rng, found = random.Random(seed), collections.Counter()
    kinds = {}
    for i, kind in enumerate(KINDS):
        expected = run(kind, folder / f"{i}-whole.pt", 6)
        run(kind, folder / f"{i}.pt", 4)
        kinds[kind] = (folder / f"{i}.pt").read_bytes(), expected
    for i in range(changes):
        kind, how = list(KINDS)[i % len(KINDS)], ways[i // len(KINDS) % len(ways)]
        good, expected = kinds[kind]
        end = outcome(kind, good, damage(good, how, rng), expected, folder / "damaged.pt")
        found[how, end] += 1
    return found


WAYS = ("value", "cut", "flipped", "overwritten")


@pytest.mark.filterwarnings("ignore")
def test_damaged_files_end_in_one_clear_error(tmp_path):
    found = count(36, WAYS, tmp_path)
    assert sum(found.values()) == 36
    assert {end for _, end in found} <= {"clear", "same"}, found
    assert all(end == "clear" for how, end in found if how != "flipped"), found  # a bit of padding does no harm


@pytest.mark.filterwarnings("ignore")
def test_random_states_that_do_not_fit_are_refused(tmp_path):
    """Also where somebody made the checksum right again."""
    file = tmp_path / "run.pt"
    run("a network on batches", file, 4)
    content = torch.load(file, weights_only=True)
    for name, other in (("random", {"python": "text"}), ("training", [])):
        other = {**content, name: other}
        state = {key: value for key, value in other.items() if key not in ("version", "checksum")}
        torch.save({**other, "checksum": checksum(state)}, file)
        with pytest.raises(ValueError, match=CLEAR):
            run("a network on batches", file, 6)


def test_a_file_that_happens_to_have_the_name_of_the_one_before_is_left_alone(tmp_path):
    foreign = tmp_path / "u.pt.previous"
    foreign.write_text("mine")
    with pytest.raises(FileExistsError, match=r"u.pt.previous exists and is no checkpoint.* give another path"):
        run("the default", tmp_path / "u.pt", 4)
    assert foreign.read_text() == "mine"


def test_a_file_that_unpacks_to_more_than_its_size_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "bomb.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"0" * 10_000_000)
    with pytest.raises(ValueError, match=r"bomb.pt is damaged or not a checkpoint .*its parts are larger than the file"):
        run("the default", tmp_path / "bomb.pt", 4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_400_damaged_files(tmp_path):
    assert {end for _, end in count(400, WAYS, tmp_path)} <= {"clear", "same"}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as place:
        ends = count(int(sys.argv[1]), ("signed",) if "--signed" in sys.argv else WAYS, Path(place))
    for (how, end), number in sorted(ends.items()):
        sys.stdout.write(f"{how}: {end}: {number}\n")
