"""Makes the pages of the C++ reference: one for each public header, from what Doxygen reads there."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from doxygen_comments import with_doxygen_comments
from repository_links import ROOT, header_page, note_pages, public_headers


def run_doxygen(headers: list[str]) -> Path:
    """The folder of its XML. It reads copies of the headers, whose comments are Doxygen's."""
    work = ROOT / "build/doxygen"
    shutil.rmtree(work, ignore_errors=True)
    for header in headers:
        lines = (ROOT / header).read_text(encoding="utf-8").splitlines()
        copy = work / "headers" / header
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text("\n".join(with_doxygen_comments(lines)) + "\n", encoding="utf-8")
    options = (ROOT / "docs/site/Doxyfile").read_text(encoding="utf-8")
    try:
        ran = subprocess.run(
            ["doxygen", "-"], input=options, cwd=work, text=True, capture_output=True, check=False
        )
    except FileNotFoundError:
        raise SystemExit(
            "cpp_reference: expected the program doxygen, got none; `make docs` installs it"
        ) from None
    if ran.returncode != 0 or ran.stderr:
        raise SystemExit(f"cpp_reference: doxygen does not understand a comment:\n{ran.stderr}")
    return work / "xml"


def text_of(element: ET.Element | None) -> str:
    return "" if element is None else " ".join("".join(element.itertext()).split())


def escaped(text: str) -> str:
    """Means in Markdown what it says."""
    return re.sub(r"[\\`*_{}\[\]#|]", r"\\\g<0>", html.escape(text, quote=False))


class Reference:
    """All public declarations, and where each is described."""

    def __init__(self) -> None:
        self.headers = public_headers()
        self.notes = note_pages()
        self.compounds: dict[str, ET.Element] = {}
        self.members: dict[str, list[ET.Element]] = {}  # of namespaces, by header
        self.places: dict[str, tuple[str, str]] = {}  # header and anchor, by Doxygen's id
        for file in sorted(run_doxygen(self.headers).glob("*.xml")):
            for compound in ET.parse(file).getroot().findall("compounddef"):
                self._take(compound)

    def _take(self, compound: ET.Element) -> None:
        kind = compound.get("kind")
        if kind not in ("class", "struct", "namespace", "file") or compound.get("prot") == "private":
            return
        self.compounds[compound.attrib["id"]] = compound
        if kind == "file":
            return
        if kind != "namespace":
            self._place(compound, text_of(compound.find("compoundname")))
        for member in compound.iter("memberdef"):
            if not is_shown(member):
                continue
            self._place(member, text_of(member.find("qualifiedname")))
            for value in member.iter("enumvalue"):
                self.places[value.attrib["id"]] = self.places[member.attrib["id"]]
            if kind == "namespace":
                self.members.setdefault(header_of(member), []).append(member)

    def _place(self, thing: ET.Element, name: str) -> None:
        self.places[thing.attrib["id"]] = header_of(thing), name

    # Text.

    def link(self, target: str, header: str) -> str:
        """From a header's page to another in docs."""
        return "../" * header_page(header).count("/") + target

    def inline(self, element: ET.Element, header: str) -> str:
        """What a paragraph holds, as Markdown."""
        parts = [self.cited(element.text or "", header)]
        for child in element:
            match child.tag:
                case "ref" if child.attrib["refid"] in self.places:
                    there, anchor = self.places[child.attrib["refid"]]
                    target = self.link(header_page(there), header)
                    parts.append(f"[{escaped(text_of(child))}]({target}#{anchor})")
                case "ref":
                    parts.append(escaped(text_of(child)))
                case "computeroutput":
                    parts.append(f"`{text_of(child)}`")
                case "bold":
                    parts.append(f"**{escaped(text_of(child))}**")
                case "ndash":
                    parts.append("--")
                case _:
                    raise SystemExit(
                        f"cpp_reference: {header}: expected plain text, got <{child.tag}> in a comment: "
                        f"{text_of(element)[:200]!r}; write it in other words"
                    )
            parts.append(self.cited(child.tail or "", header))
        return "".join(parts)

    def cited(self, text: str, header: str) -> str:
        """Notes and pages that a comment names become links to them."""
        found = re.split(r"(\[Note: [^\]]+\]|docs/[\w/]+\.md)", re.sub(r"\s+", " ", text))
        for at, name in enumerate(found):
            if at % 2 == 0:
                found[at] = escaped(name)
            elif name.startswith("docs/"):
                found[at] = f"[{escaped(name)}]({self.link(name.removeprefix('docs/'), header)})"
            else:
                title = name.removeprefix("[Note: ").removesuffix("]")
                if title not in self.notes:
                    raise SystemExit(f"cpp_reference: {header}: no such note: {title!r}")
                anchor = re.sub(r"[^\w\- ]", "", name.lower()).replace(" ", "-")
                found[at] = f"[{escaped(name)}]({self.link(self.notes[title], header)}#{anchor})"
        return "".join(found)

    def prose(self, thing: ET.Element, header: str) -> list[str]:
        blocks: list[str] = []
        for part in ("briefdescription", "detaileddescription"):
            for paragraph in thing.findall(f"{part}/para"):
                code = paragraph.find("verbatim")
                listed = paragraph.find("itemizedlist")
                if code is not None:
                    blocks.append(f"```cpp\n{(code.text or '').rstrip()}\n```")
                elif listed is not None:
                    items = (self.inline(item, header) for item in listed.iter("para"))
                    blocks.append("\n".join(f"- {item.strip()}" for item in items))
                else:
                    blocks.append(self.inline(paragraph, header).strip())
        return [line for block in blocks if block for line in (block, "")]

    def code(self, element: ET.Element | None, header: str) -> str:
        """A type or a value as HTML, in which names are links."""
        if element is None:
            return ""
        parts = [html.escape(element.text or "")]
        for child in element:
            shown = html.escape(text_of(child))
            if child.attrib.get("refid") in self.places:
                there, anchor = self.places[child.attrib["refid"]]
                up = "../" * header.count("/")
                shown = f'<a href="{up}{there}.html#{anchor}">{shown}</a>'
            parts += [shown, html.escape(child.tail or "")]
        joined = " ".join("".join(parts).split())
        if element.tag != "type":
            return joined
        # Doxygen puts blanks into types.
        return re.sub(r"(?<=&lt;) | (?=&gt;)| (?=(\*|&amp;)+$)", "", joined)

    # Declarations.

    def signature(self, member: ET.Element, header: str) -> str:
        kind, name = member.get("kind"), text_of(member.find("name"))
        kind_text = self.code(member.find("type"), header)
        if member.get("constexpr") == "yes":  # newer versions of Doxygen say it apart
            kind_text = "constexpr " + kind_text.removeprefix("constexpr ")
        shown_name = f"<b>{html.escape(name)}</b>"
        if kind == "typedef":
            return f"using {shown_name} = {kind_text}"
        if kind == "variable":
            value = self.code(member.find("initializer"), header)
            value = f" {value}" if value.startswith("=") else value
            dimensions = html.escape(text_of(member.find("argsstring")))
            return f"{kind_text} {shown_name}{dimensions}{value}"
        if kind == "enum":
            return f"enum{' class' if member.get('strong') == 'yes' else ''} {shown_name}"
        arguments = []
        for parameter in member.findall("param"):
            words = [self.code(parameter.find("type"), header), text_of(parameter.find("declname"))]
            value = self.code(parameter.find("defval"), header)
            arguments.append(" ".join(word for word in words if word) + (f" = {value}" if value else ""))
        before = "static " if member.get("static") == "yes" else ""
        before += "virtual " if member.get("virt") in ("virtual", "pure-virtual") else ""
        before += "explicit " if member.get("explicit") == "yes" else ""
        before += f"{kind_text} " if kind_text and not name.startswith("operator bool") else ""
        after = text_of(member.find("argsstring")).rpartition(")")[2].replace("=0", " = 0")
        after = f" {html.escape(after.strip())}" if after.strip() else ""
        template = member.find("templateparamlist")
        head = f"{self.template(template, header)}\n" if template is not None else ""
        plain = len(re.sub(r"<[^>]+>", "", f"{before}{name}({', '.join(arguments)}){after}"))
        if plain <= 84:
            return f"{head}{before}{shown_name}({', '.join(arguments)}){after}"
        lines = ",\n".join(f"    {argument}" for argument in arguments)
        return f"{head}{before}{shown_name}(\n{lines}){after}"

    def template(self, parameters: ET.Element, header: str) -> str:
        shown = ", ".join(self.code(one.find("type"), header) for one in parameters.findall("param"))
        return f"template &lt;{shown}&gt;"

    def declaration(self, member: ET.Element, header: str) -> list[str]:
        shown = self.signature(member, header)
        values = member.findall("enumvalue")
        explained = [value for value in values if value.find("briefdescription/para") is not None
                     or value.find("detaileddescription/para") is not None]
        if values and not explained:
            names = ", ".join(self.enumerator(value) for value in values)
            shown += f" {{ {names} }}"
        lines = [f'<pre class="cpp"><code>{shown}</code></pre>', "", *self.prose(member, header)]
        if explained:
            lines += self.listed([
                (f"<code>{self.enumerator(value)}</code>", self.prose(value, header)) for value in values
            ])
        return lines

    def enumerator(self, value: ET.Element) -> str:
        start = text_of(value.find("initializer"))
        return html.escape(text_of(value.find("name")) + (f" {start}" if start else ""))

    def listed(self, rows: list[tuple[str, list[str]]]) -> list[str]:
        """Terms, each with what is said about it, if anything is."""
        lines = []
        for term, prose in rows:
            text = " ".join(prose).strip()
            lines.append(f"- {term}: {text}" if text else f"- {term}")
        return [*lines, ""]

    def describe_class(self, compound: ET.Element, header: str) -> Iterator[str]:
        name = text_of(compound.find("compoundname"))
        short = name.removeprefix("hsdp::")
        yield f"## {compound.get('kind')} {short} {{: #{name} }}"
        yield ""
        template = compound.find("templateparamlist")
        if template is not None:
            yield f'<pre class="cpp"><code>{self.template(template, header)}</code></pre>'
            yield ""
        bases = [base for base in compound.findall("basecompoundref") if base.get("prot") == "public"]
        if bases:
            shown = ", ".join(self.inline(wrapped(base), header) for base in bases)
            yield f"Derives from {shown}."
            yield ""
        yield from self.prose(compound, header)
        members = sorted(filter(is_shown, compound.findall("sectiondef/memberdef")), key=line_of)
        yield from self.describe(members, header, 3, set())

    def describe(
        self, members: list[ET.Element], header: str, level: int, seen: set[str]
    ) -> Iterator[str]:
        """Fields of a class as a list, the rest under headings, one for overloads in a row. `seen`: the
        anchors that are taken.
        """

        def key(member: ET.Element) -> tuple[bool, str]:
            field = level == 3 and member.get("kind") == "variable"
            return field, "" if field else text_of(member.find("name"))

        for (field, name), group in groupby(members, key):
            if field:
                rows = []
                for member in group:
                    anchor = self.places[member.attrib["id"]][1]
                    term = f'<code id="{anchor}">{self.signature(member, header)}</code>'
                    rows.append((term, self.prose(member, header)))
                yield from self.listed(rows)
                continue
            overloads = list(group)
            anchor = self.places[overloads[0].attrib["id"]][1]
            at = f" {{: #{anchor} }}" if anchor not in seen else ""
            seen.add(anchor)
            yield f"{'#' * level} {escaped(name)}{at}"
            yield ""
            for member in overloads:
                yield from self.declaration(member, header)

    def page(self, header: str) -> str:
        """Everything that a header declares, in its order."""
        lines = [f"# {header}", "", f"`#include \"{header}\"`", "", *self.prose(self.file(header), header)]
        classes = [one for one in self.compounds.values()
                   if one.get("kind") in ("class", "struct") and header_of(one) == header]
        seen: set[str] = set()
        things = sorted(classes + self.members.get(header, []), key=line_of)
        for is_class, group in groupby(things, lambda thing: thing.tag == "compounddef"):
            if is_class:
                for compound in group:
                    lines += self.describe_class(compound, header)
            else:
                lines += self.describe(list(group), header, 2, seen)
        return "\n".join(lines) + "\n"

    def index(self) -> str:
        """The headers, each with what it is for."""
        lines = ["# C++ reference", "",
                 "The public headers, and what they declare. `#include` them from the root: "
                 '`#include "hsdp/reducer.h"`.', ""]
        for folder, headers in groupby(self.headers, lambda header: header.partition("/")[0]):
            lines += [f"## {folder}", ""]
            for header in headers:
                page = header_page(header).removeprefix("cpp/")
                lines.append(f"- [`{header}`]({page}): {self.first_sentence(header)}")
            lines.append("")
        return "\n".join(lines)

    def first_sentence(self, header: str) -> str:
        text = text_of(self.file(header).find("detaileddescription/para"))
        if not text:
            raise SystemExit(
                f"cpp_reference: {header}: expected a comment at the top that says what it is for, got none"
            )
        sentence = re.split(r"(?<=[.?]) (?=[A-Z])", re.sub(r" ?\[Note: [^]]+\]", "", text))[0]
        return self.cited(sentence, "index.h")  # in the folder of the list

    def file(self, header: str) -> ET.Element:
        return next(one for one in self.compounds.values()
                    if one.get("kind") == "file" and header_of(one) == header)


def wrapped(base: ET.Element) -> ET.Element:
    """A base class as the paragraph that names it."""
    paragraph = ET.Element("para")
    name = ET.SubElement(paragraph, "ref", {"refid": base.get("refid", "")})
    name.text = base.text
    return paragraph


def header_of(thing: ET.Element) -> str:
    location = thing.find("location")
    return "" if location is None else location.attrib["file"].removeprefix("headers/")


def line_of(thing: ET.Element) -> int:
    location = thing.find("location")
    return 0 if location is None else int(location.attrib["line"])


def is_shown(member: ET.Element) -> bool:
    """Not what every class has: deleted functions, destructors without a word, moving."""
    if member.get("prot") != "public" or member.get("kind") == "friend":
        return False
    name, arguments = text_of(member.find("name")), text_of(member.find("argsstring"))
    if name.startswith("~"):
        return any(member.findall(f"{part}/para") for part in ("briefdescription", "detaileddescription"))
    moves = arguments.replace(" ", "").startswith(f"({name}&&")
    return name != "operator=" and not moves and not re.search(r"= ?delete$", arguments)
