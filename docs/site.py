"""How do the pages become a site? What GitHub does by itself and mkdocs does not.

Decisions are listed in order, a list needs no empty line before it, and `<!-- source: FILE -->` becomes that file.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_LIST = re.compile(r"(?<=\n)(?![ \t]|- |\* |\d+\. |\n)([^\n]+\n)(?=- |\d+\. )")
_SOURCE = re.compile(r"<!-- source: (\S+) -->")


def on_config(config: Any) -> Any:
    decisions = [{_title(path): f"decisions/{path.name}"} for path in sorted((DOCS / "decisions").glob("*.md"))]
    config.nav = [*config.nav, {"Decisions": decisions}]
    return config


def on_page_markdown(markdown: str, **_: Any) -> str:
    first = sorted((DOCS / "decisions").glob("*.md"))[0].name
    text = markdown.replace("(decisions/)", f"(decisions/{first})")
    fences = _FENCE.findall(text)
    parts = [_LIST.sub(r"\1\n", part) for part in _FENCE.split(text)]
    whole = "".join(part + fence for part, fence in zip(parts, [*fences, ""], strict=True))
    return _SOURCE.sub(lambda found: f"```\n{(DOCS.parent / found[1]).read_text()}```", whole)


def _title(path: Path) -> str:
    return path.read_text().partition("\n")[0].lstrip("# ")
