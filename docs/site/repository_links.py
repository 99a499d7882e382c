"""Links that work in the repository, and where they lead in the site.

A page in docs links to `../examples/x.py`. The site has a page for each such file; a public header's is
its reference, and the README is the first page.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"(?<=\]\()([^)\s#]+)(#[^)\s]*)?(?=\))")
CODE = re.compile(r"(^```.*?^```$|`[^`\n]+`)", re.MULTILINE | re.DOTALL)
LANGUAGES = {".py": "python", ".h": "cpp", ".cpp": "cpp", ".cu": "cuda", ".sh": "sh", ".txt": "cmake"}

# Pages that are written outside of docs.
PAGES = {"index.md": "README.md", "contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}


def public_headers() -> list[str]:
    listed = (ROOT / "cmake/public_headers.cmake").read_text(encoding="utf-8")
    return re.findall(r"^\s+(\S+\.h)", listed, re.MULTILINE)


def header_page(header: str) -> str:
    return f"cpp/{header}.md"


def note_pages() -> dict[str, str]:
    """The page of each note, by the note's title."""
    pages = sorted((ROOT / "docs/notes").glob("*.md"))
    return {
        title: f"notes/{page.name}"
        for page in pages
        for title in re.findall(r"^## Note: (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    }


def site_page(path: str) -> str | None:
    """The page that shows a file or folder of the repository; None where there is no such file."""
    for page, source in PAGES.items():
        if path == source:
            return page
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path in public_headers():
        return header_page(path)
    if path.startswith(("build/", "../")) or not (ROOT / path).exists():
        return None
    return f"source/{path}.md"


def target_of(link: str, page: str) -> str | None:
    """The page that a link of `page` leads to; None: MkDocs is to judge it as it stands."""
    if "://" in link or link.startswith(("mailto:", "/")):
        return None
    folder = posixpath.dirname(PAGES.get(page, f"docs/{page}"))
    return site_page(posixpath.normpath(posixpath.join(folder, link)))


def with_site_links(markdown: str, page: str) -> str:
    def moved(found: re.Match[str]) -> str:
        target = target_of(found[1], page)
        if target is None:
            return found[0]
        return posixpath.relpath(target, posixpath.dirname(page) or ".") + (found[2] or "")

    parts = CODE.split(markdown)
    parts[::2] = [LINK.sub(moved, part) for part in parts[::2]]
    return "".join(parts)


def files_in(path: str) -> list[str]:
    return sorted(file.name for file in (ROOT / path).iterdir() if file.is_file())


def linked_sources(markdown: str, page: str) -> set[str]:
    """The files and folders outside of docs that a page links to, and the files in those folders."""
    found = set()
    for link in LINK.finditer(markdown):
        target = target_of(link[1], page)
        if target is not None and target.startswith("source/"):
            path = target.removeprefix("source/").removesuffix(".md")
            found.add(path)
            if (ROOT / path).is_dir():
                found |= {f"{path}/{name}" for name in files_in(path)}
    return found


def source_page(path: str) -> str:
    """A file with its code, or a folder with its files."""
    if (ROOT / path).is_dir():
        folder = posixpath.basename(path)
        return "\n".join([f"# {path}", "", *(f"- [{name}]({folder}/{name}.md)" for name in files_in(path))])
    code = (ROOT / path).read_text(encoding="utf-8")
    language = LANGUAGES.get(posixpath.splitext(path)[1], "text")
    return f"# {path}\n\n````{language}\n{code.rstrip()}\n````\n"
