"""Text of the reference that comes from the program: settings, commands, file formats and the Python API.

    python docs/reference/generated.py     # write it into the pages

A page holds it between `<!-- generated: NAME ARGUMENTS -->`, where NAME is a key of GENERATORS, and
`<!-- /generated -->`. On the site, Sphinx documents the Python API in place of the blocks `api`.
"""

import dataclasses
import inspect
import io
import json
import os
import re
import textwrap
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import reduce
from importlib import import_module
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

from docstring_parser import parse

DOCS = Path(__file__).parent.parent
BLOCK = re.compile(r"(<!-- generated: (\w+) ?([^\n]*?) -->\n).*?(<!-- /generated -->)", re.DOTALL)
SECTION = re.compile(r"^## (.+)\n((?:(?!^## ).*\n?)*)", re.MULTILINE)
ENTRY = re.compile(r"^- \[[^\]]*\]\((\S+?\.md)\)", re.MULTILINE)


def filled_in(text: str, site: bool = False) -> str:
    """Return a page with current text in its blocks. site: with directives of Sphinx for the Python API."""

    def block(match: re.Match[str]) -> str:
        generate = directive if site and match[2] == "api" else GENERATORS[match[2]]
        return f"{match[1]}\n{generate(*match[3].split())}\n\n{match[4]}"

    return BLOCK.sub(block, text)


def write() -> None:
    """Write the current text into the pages."""
    for page in sorted(DOCS.glob("reference/*.md")):
        text = filled_in(page.read_text(encoding="utf-8"))
        if text != page.read_text(encoding="utf-8"):
            page.write_text(text, encoding="utf-8")
            print(f"{page.relative_to(DOCS.parent)}: updated")


def sections(index: str) -> dict[str, list[str]]:
    """Return the pages that each section of docs/index.md lists, relative to docs/."""
    return {title: pages for title, body in SECTION.findall(index) if (pages := ENTRY.findall(body))}


def settings(path: str, prefix: str) -> str:
    """Return a table of a class's arguments: flag and meaning, with type and default.

    Args:
        path: import path of the class, whose docstring has an `Args:` section.
        prefix: section of the configuration, such as `model`.
    """
    return settings_of(imported(path), prefix)


def settings_of(target: type, prefix: str) -> str:
    """Return a table of a class's arguments, as `settings` does."""
    from cifar_lit.cli.settings_parser import TRAINER_DEFAULTS

    meanings = {each.arg_name: each.description for each in parse(documentation(target)).params}
    ours = TRAINER_DEFAULTS if prefix == "trainer" else {}
    rows = []
    for name, parameter in inspect.signature(target).parameters.items():
        if name != "kwargs":
            default = ours.get(name, parameter.default)
            meaning = (meanings.get(name) or "").replace("Default: ``None``.", "").strip()
            if prefix == "trainer":  # Lightning's references have roles
                meaning = re.sub(r":\w+:`~?(?:[\w.]+\.)?(\w+)`", r"`\1`", meaning)
            value = "required" if default is inspect.Parameter.empty else shown(default)
            rows.append([f"`--{prefix}.{name}`", explained(meaning, type_name(parameter.annotation), value)])
    return table(["flag", "meaning"], rows)


def explained(meaning: str, kind: str, default: str) -> str:
    """Return a meaning with type and default behind it, as one cell: a third column would not fit on a phone."""
    facts = code(kind)
    if default:
        facts += f", default {code(default)}"
    return f"{meaning} ({facts})" if meaning else ""


def features() -> str:
    """Return a section for each feature: what it does, and a table of its settings."""
    from cifar_lit.features import FEATURES, feature_class

    parts = []
    for name in FEATURES:
        kind = feature_class(name)
        parts += [f"### {name}", description(kind, f"`{kind.__name__}`: ")]
        if inspect.signature(kind).parameters:
            parts.append(settings_of(kind, name))
        else:
            parts.append(f"It has no settings: `--{name}` turns it on.")
    return "\n\n".join(parts)


def optimizers() -> str:
    """Return a section for each optimizer, and one for the schedules, with a table of the settings."""
    from cifar_lit.training.optimizers import OPTIMIZERS
    from cifar_lit.training.schedules import ScheduleSettings

    parts = []
    for name, kind in OPTIMIZERS.items():
        parts += [f"### {name}", description(kind), settings_of(kind, "model.optimizer_options")]
    parts += ["### Schedules", description(ScheduleSettings), settings_of(ScheduleSettings, "model.schedule_options")]
    return "\n\n".join(parts)


def description(kind: type, before: str = "") -> str:
    """Return the paragraphs of a class's docstring before its sections, wrapped for Markdown. before: first words."""
    text = re.split(r"^(?:Args|Attributes|Raises):", inspect.getdoc(kind) or "", flags=re.MULTILINE)[0]
    paragraphs = [" ".join(paragraph.split()) for paragraph in (before + text.strip()).split("\n\n")]
    return "\n\n".join(textwrap.fill(paragraph, 100, break_on_hyphens=False) for paragraph in paragraphs)


def program() -> str:
    """Return a table of the settings that belong to the program rather than to Trainer, model, data or features."""
    from cifar_lit.cli.flags import FLAGS
    from cifar_lit.cli.settings_parser import OWN_SETTINGS

    rows = []
    for name, (kind, default) in OWN_SETTINGS.items():
        meaning = FLAGS[name.replace("_", "-")].text
        rows.append([code(f"--{name}"), explained(meaning, type_name(kind), shown(default))])
    return table(["flag", "meaning"], rows)


def overview() -> str:
    """Return the text of `cifar-lit --help`."""
    from cifar_lit.cli.main import overview as lines

    return fenced("\n".join(lines()))


def command(*words: str) -> str:
    """Return the text of `cifar-lit WORDS --help`, without the data settings that the settings page lists."""
    from cifar_lit.cli.main import main

    output, columns = io.StringIO(), os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "88"
    with redirect_stdout(output):
        main([*words, "--help"])
    os.environ.pop("COLUMNS") if columns is None else os.environ.update(COLUMNS=columns)
    text = re.sub(r"\s+\[--data(?:\.\w+)* [^\]]+\]", "", output.getvalue())
    groups = re.split(r"\n\n(?=\S[^\n]*:\n +-)", text)
    return fenced("\n\n".join(group for group in groups if not re.search(r"  --data(\.\w+)? CONFIG", group)))


def fields(path: str) -> str:
    """Return a table of a dataclass's fields, described in its docstring or by comments beside or above them."""
    target = imported(path)
    described = {
        name: each.description for each in parse(documentation(target)).params for name in each.arg_name.split(", ")
    }
    described = _comments(inspect.getsource(target)) | described
    rows = []
    for each in dataclasses.fields(target):
        rows.append([code(each.name), explained(described.get(each.name) or "", str(each.type), "")])
    return table(["key", "meaning"], rows)


def _comments(source: str) -> dict[str, str]:
    """Return the comment beside or above each annotated name of a class body, else that of the name before."""
    comments: dict[str, str] = {}
    above: list[str] = []
    comment = ""
    for line in source.splitlines():
        if field := re.match(r"    (\w+): [^#]*?(?:# (.*))?$", line):
            comments[field[1]] = comment = field[2] or " ".join(above) or comment
        above = [*above, line.strip(" #")] if line.startswith("    # ") else []
    return comments


def schema(name: str) -> str:
    """Return a table of the keys of a JSON schema in docs/schema/, nested keys with dots."""
    document = json.loads((DOCS / "schema" / name).read_text())
    rows = []

    def add(node: dict[str, Any], prefix: str) -> None:
        for key, value in node.get("properties", {}).items():
            variants = [resolved(each, document) for each in (value, *value.get("anyOf", []), *value.get("oneOf", []))]
            kinds = [kind for each in variants for kind in _listed(each.get("type", []))]
            meaning = next((each["description"] for each in variants if "description" in each), "")
            rows.append([code(prefix + key), explained(meaning, " or ".join(dict.fromkeys(kinds)), "")])
            for variant in variants:
                add(variant, f"{prefix}{key}.")
                lists = variant.get("additionalProperties") or variant  # an object with any names
                add(lists.get("items") or {}, f"{prefix}{key}[].")

    add(document, "")
    return table(["key", "meaning"], rows)


def _listed(kinds: str | list[str]) -> list[str]:
    return [kinds] if isinstance(kinds, str) else kinds


def resolved(node: dict[str, Any], document: dict[str, Any]) -> dict[str, Any]:
    """Return what a `$ref` of a schema points to, with the node's own keys; the node itself if it has none."""
    if "$ref" not in node:
        return node
    target = reduce(lambda part, key: part[key], node["$ref"].split("/")[1:], document)
    return {**target, **node}


def api(kind: str, name: str, *options: str) -> str:
    """Return a link to the source of a class or function, and a table of its public members, without Lightning's."""
    target = imported(name)
    source = Path(inspect.getfile(target)).relative_to(DOCS.parent).as_posix()
    head = textwrap.fill(f"[{source}](../../{source}): {summary(target)}", 100, break_on_hyphens=False)
    rows = []
    for member, value in vars(target).items() if options else ():
        is_own = getattr(value, "__module__", None) == target.__module__
        is_hook = any(hasattr(base, member) for base in target.__mro__[1:])
        if is_own and not is_hook and not member.startswith("_") and inspect.getdoc(value):
            rows.append([code(member + signature(value)), summary(value)])
    return "\n\n".join([head, *([table(["name", "what it does"], rows)] if rows else [])])


def signature(target: Any) -> str:
    """Return the names of a function's arguments in parentheses, nothing for what is no function."""
    if not inspect.isfunction(target):
        return ""
    return f"({', '.join(name for name in inspect.signature(target).parameters if name != 'self')})"


def summary(target: Any) -> str:
    """Return the first line of a docstring."""
    return (inspect.getdoc(target) or "").partition("\n")[0]


def directive(kind: str, name: str, *options: str) -> str:
    """Return a directive of autodoc, such as `autoclass`."""
    lines = [f".. {kind}:: {name}", *[f"   :{option.replace('=', ': ')}" for option in options]]
    return "\n".join(["```{eval-rst}", *lines, "```"])


def imported(path: str) -> Any:
    """Return what an import path names."""
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


def documentation(target: Any) -> str:
    """Return the docstring with the `Args:` section: the class's, or that of its `__init__`."""
    texts = [inspect.getdoc(target) or "", inspect.getdoc(target.__init__) or ""]
    return next((text for text in texts if re.search(r"^(Args|Attributes):", text, re.MULTILINE)), "")


def type_name(annotation: Any) -> str:
    """Return an annotation as source code without module names."""
    if get_origin(annotation) in (Union, UnionType):
        names = [type_name(each) for each in get_args(annotation)]
        if get_origin(annotation) is Union:  # typing caches Unions: their order depends on what was imported before
            names.sort(key=lambda name: (name == "None", name))
        return " | ".join(names)
    if annotation is NoneType:
        return "None"
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return re.sub(r"\b(?:\w+\.)+(?=\w)", "", text)


def shown(value: Any) -> str:
    """Return a default as YAML has it; nothing for null, which leaves the setting out, and for a group of settings."""
    if value in (inspect.Parameter.empty, None) or dataclasses.is_dataclass(value):
        return ""
    return json.dumps(value, default=str).strip('"')


def code(text: str) -> str:
    """Return text as code, nothing for no text."""
    return f"`{text}`" if text else ""


def fenced(text: str) -> str:
    """Return text as a block of code."""
    return f"```text\n{text.strip()}\n```"


def table(head: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    cells = [[re.sub(r"\s+", " ", cell).replace("|", "\\|") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


GENERATORS: dict[str, Callable[..., str]] = {
    function.__name__: function
    for function in (settings, features, optimizers, program, overview, command, fields, schema, api)
}

if __name__ == "__main__":
    write()
