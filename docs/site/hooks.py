"""What the site has beside the pages in docs: the README as its first page, the files that pages link to,
and the C++ reference.
"""

from __future__ import annotations

import re
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).parent))

from cpp_reference import Reference  # noqa: E402
from repository_links import (  # noqa: E402
    PAGES,
    ROOT,
    header_page,
    linked_sources,
    source_page,
    with_site_links,
)

HEADERS = "cpp/index.md"  # the list of the public headers


def on_files(files: Files, config: MkDocsConfig) -> Files:
    def add(page: str, content: str) -> None:
        files.append(File.generated(config, page, content=content))

    for page, source in PAGES.items():
        add(page, (ROOT / source).read_text(encoding="utf-8"))
    sources = set[str]().union(
        *(linked_sources(file.content_string, file.src_uri) for file in files.documentation_pages())
    )
    for path in sources:
        add(f"source/{path}.md", source_page(path))

    reference = Reference()
    for header in reference.headers:
        add(header_page(header), reference.page(header))
    add(HEADERS, reference.index())
    add_to_navigation(config.nav or [], reference.headers)
    return files


def add_to_navigation(nav: list[Any], headers: list[str]) -> None:
    """The headers stand below the entry of their list."""
    folders = [
        {folder: [{header.partition("/")[2]: header_page(header)} for header in group]}
        for folder, group in groupby(headers, lambda header: header.partition("/")[0])
    ]
    for section in nav:
        for entries in section.values():
            for entry in entries if isinstance(entries, list) else []:
                for title, page in entry.items():
                    if page == HEADERS:
                        entry[title] = [HEADERS, *folders]


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    made_here = page.file.src_uri.startswith(("cpp/", "source/"))
    return markdown if made_here else with_site_links(for_readers(markdown), page.file.src_uri)


def for_readers(markdown: str) -> str:
    """Titles of blocks that the tests leave out say so in a reader's words."""
    return re.sub(r"^(```.*)not run here", r"\1not run by the tests", markdown, flags=re.MULTILINE)
