"""``python -m meha`` is the command ``meha``."""

from meha_cli import app

if __name__ == "__main__":
    app(prog_name="meha")
