"""Build the wheel and the sdist, check them, and try the wheel alone in a new environment: make release-check

The new environment sees the torch and numpy of the environment that runs this script, and none of its other packages.
"""

import re
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from importlib.metadata import distribution
from pathlib import Path

ROOT = Path(__file__).parent.parent
NEEDED = ("torch", "numpy")


def run(*command, **options):
    """Run a command; its output if it succeeds, and an end if it does not."""
    result = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False, **options)
    if result.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{result.stdout}{result.stderr}")
    return result.stdout


def required(names):
    """The names of these distributions and of all that they require, as far as they are installed."""
    found, waiting = {}, list(names)
    while waiting:
        name = re.split(r"[ ;<>=!~\[(]", waiting.pop(), maxsplit=1)[0].lower().replace("_", "-")
        if name in found:
            continue
        try:
            found[name] = distribution(name)
        except ImportError:
            continue
        waiting += [line for line in found[name].requires or [] if "extra ==" not in line]
    return found.values()


def link(target):
    """Link the files of the needed distributions into a folder of packages."""
    for each in required(NEEDED):
        for top in {str(file).split("/")[0] for file in each.files or [] if not str(file).startswith("..")}:
            source, place = Path(each.locate_file(top)), target / top
            if source.exists() and not place.exists():
                place.symlink_to(source)


def main():
    """Build, check, install, import, run."""
    with tempfile.TemporaryDirectory() as folder:
        dist = Path(folder) / "dist"
        run(sys.executable, "-m", "build", "--no-isolation", "--outdir", dist, ROOT)
        wheel, sdist = next(dist.glob("*.whl")), next(dist.glob("*.tar.gz"))
        print(run(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist).strip())
        inside = zipfile.ZipFile(wheel).namelist()
        for name in (
            "meha/__init__.py",
            "meha/py.typed",
            "meha_cli.py",
            "meha/methods/default.py",
        ):
            if name not in inside:
                sys.exit(f"{wheel.name}: lacks {name}.")
        if any("lab" in Path(name).parts or "meha_lab" in name for name in inside):
            sys.exit(f"{wheel.name}: has parts of the laboratory.")
        with tarfile.open(sdist) as file:
            packed = {name.partition("/")[2] for name in file.getnames()}
        for name in ("README.md", "LICENSE", "CITATION.cff", "tests/test_readme.py", "docs/conf.py", "examples/label_noise.py"):
            if name not in packed:
                sys.exit(f"{sdist.name}: lacks {name}.")
        sizes = ", ".join(f"{path.name} {path.stat().st_size / 1e6:.1f} MB" for path in (wheel, sdist))
        print(f"Files: {sizes}; {len(inside)} and {len(packed)} entries.")

        fresh = Path(folder) / "fresh"
        venv.create(fresh, with_pip=True)
        python = fresh / "bin" / "python"
        packages = next((fresh / "lib").glob("python*/site-packages"))
        link(packages)
        run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-index", wheel)
        strange = run(
            python, "-c", "import sys, meha; print(*[n for n in ('matplotlib', 'rich', 'typer') if n in sys.modules])"
        )
        if strange.strip():
            sys.exit(f"import meha imports {strange.strip()}, which it must not need.")
        code, expected = re.search(
            r"```python\n(.*?)```\n\n```text\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL
        ).groups()
        shown = run(python, "-c", code, cwd=folder)
        if shown != expected:
            sys.exit(f"The first example of the README prints {shown!r} in a new environment, and not {expected!r}.")
        print("In a new environment without extras: imported, and the first example of the README prints what it says.")


if __name__ == "__main__":
    main()
