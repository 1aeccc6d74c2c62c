"""MkDocs hook: adds the changelog, and checks links into the repository.

Pages link to files of the repository, such as `../../slurm/split.sbatch`, so that the links work where the
pages are read as files. The site has no such files, so the hook turns such a link into plain text or, with
`repo_url` in mkdocs.yml, into a link to the file in the repository. A block that is marked as a file gets the
file's name as its title.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
_FILE = re.compile(r"(?<=\n)<!-- file: (?P<name>\S+) -->\n(?P<fence>```\w+)(?=\n)")
_LINK = re.compile(r"\[([^\]]+)\]\(([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    changelog = (ROOT / "CHANGELOG.md").read_text()
    files.append(File.generated(config, "reference/changelog.md", content=changelog))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Replace links out of docs/. Raises PluginError for a link that leads to no file of the repository."""
    docs, here = Path(config.docs_dir), Path(config.docs_dir, page.file.src_uri).parent

    def replaced(link: re.Match[str]) -> str:
        text, target = link[1], link[2]
        if "://" in target or target.startswith("mailto:"):
            return link[0]
        file = Path(os.path.normpath(here / target))
        if file.is_relative_to(docs):
            return link[0]
        if not file.exists():
            raise PluginError(f"{page.file.src_uri}: the link to {target} leads to no file of the repository")
        if config.repo_url:
            return f"[{text}]({config.repo_url.rstrip('/')}/blob/main/{file.relative_to(ROOT)})"
        return text

    return _FILE.sub(r'\g<fence> title="\g<name>"', _LINK.sub(replaced, markdown))
