"""The last look at a finished site, before it replaces the one that readers have.

Used by ``draftlayers.booksite.stage`` after every build and by the tests. A page passes when it
loads nothing from outside, every picture has a text in its place, every link inside the book
leads somewhere, and no traceback is printed. Building the pages is left to ``stage``.
"""

from __future__ import annotations

import re
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

# Attributes that make a browser fetch something when the page opens.
_LOADS = {
    "script": ("src",),
    "img": ("src", "srcset"),
    "source": ("src", "srcset"),
    "iframe": ("src",),
    "video": ("src", "poster"),
    "audio": ("src",),
    "embed": ("src",),
    "object": ("data",),
    "track": ("src",),
    "input": ("src",),
    "image": ("href", "xlink:href"),
    "use": ("href", "xlink:href"),
}
_LINK_LOADS = {"stylesheet", "icon", "preload", "modulepreload", "prefetch", "preconnect"}
_CSS_LOAD = re.compile(r"""(?:url\(\s*|@import\s+)["']?((?:https?:)?//[^"')\s]+)""", re.I)


class _Page(HTMLParser):
    """Collects from one page what the scan asks about."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.without_alt: list[str] = []
        self.traceback = False
        self._style = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self._style = tag == "style"
        if "id" in values:
            self.ids.add(values["id"])
        self.loads += [values[name] for name in _LOADS.get(tag, ()) if values.get(name)]
        self.loads += _CSS_LOAD.findall(values.get("style", ""))
        if tag == "link" and _LINK_LOADS & set(values.get("rel", "").lower().split()):
            self.loads.append(values.get("href", ""))
        if tag == "a" and values.get("href"):
            self.links.append(values["href"])
        if tag == "img":
            # Sphinx and myst-nb put the file's own path where an author gave no text.
            alt = values.get("alt", "").strip()
            stem = Path(unquote(urlsplit(values.get("src", "")).path)).name
            if not alt or (stem and alt.endswith(stem)):
                self.without_alt.append(values.get("src", "")[:80])
        if "traceback" in values.get("class", "").split():
            self.traceback = True

    def handle_data(self, data: str) -> None:
        if self._style:
            self.loads += _CSS_LOAD.findall(data)
        if "Traceback (most recent call last)" in data:
            self.traceback = True


def _from_outside(address: str) -> bool:
    # The srcset of a picture may hold several addresses.
    return any(re.match(r"(?:https?:)?//", part.strip()) for part in address.split(","))


def scan_site(html: Path) -> list[str]:
    """Return one sentence per fault of the site in the folder ``html``; an empty list if none."""

    @cache
    def page(path: Path) -> _Page:
        return _Page(path.read_text(encoding="utf-8"))

    faults = []
    static = html / "_static"
    for path in sorted(html.rglob("*.html")):
        if path.is_relative_to(static):
            continue
        name = path.relative_to(html).as_posix()
        here = page(path)
        faults += [
            f"{name} loads {load} from outside" for load in here.loads if _from_outside(load)
        ]
        faults += [f"{name}: the picture {src} has no alt text" for src in here.without_alt]
        if here.traceback:
            faults.append(f"{name} shows a traceback")
        inside = [load for load in here.loads if not _from_outside(load)]
        for address in dict.fromkeys(here.links + inside):
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.exists():
                faults.append(f"{name} links to {address}, which does not exist")
            elif (
                parts.fragment
                and target.suffix == ".html"
                and unquote(parts.fragment) not in page(target).ids
            ):
                faults.append(f"{name} links to {address}, but that place does not exist")
    for path in sorted(html.rglob("*.css")):
        for load in _CSS_LOAD.findall(path.read_text(encoding="utf-8", errors="replace")):
            faults.append(f"{path.relative_to(html).as_posix()} loads {load} from outside")
    return faults
