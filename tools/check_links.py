"""Check that links between HTML pages lead to a file, and to a place in it: python tools/check_links.py out/docs"""

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Links(HTMLParser):
    """The addresses and the names of a page."""

    def __init__(self):
        super().__init__()
        self.targets, self.names = set(), set()

    def handle_starttag(self, tag, attributes):
        """Collect links, and what can be linked to."""
        for name, value in attributes:
            if name in ("href", "src") and value and tag != "use":
                self.targets.add(value)
            if name in ("id", "name") and value:
                self.names.add(value)


def main(folder):
    """Print what is broken, and end with an error if anything is."""
    pages = {path.resolve(): Links() for path in Path(folder).rglob("*.html")}
    for path, page in pages.items():
        page.feed(path.read_text())
    broken, count = [], 0
    for path, page in pages.items():
        for target in sorted(page.targets):
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            count += 1
            place = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not place.exists():
                broken.append(f"{path}: {target} does not exist")
            elif "_modules" in path.parts:
                continue  # listings of source code lead back to a page; Sphinx guesses the place in it
            elif parts.fragment and place in pages and unquote(parts.fragment) not in pages[place].names | {"top"}:
                broken.append(f"{path}: {target} has no such place")
    print("\n".join([*broken, f"{len(pages)} pages, {count} internal links, {len(broken)} broken."]))
    sys.exit(bool(broken))


if __name__ == "__main__":
    main(sys.argv[1])
