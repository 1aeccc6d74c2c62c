"""The tool: a search by BM25 (https://en.wikipedia.org/wiki/Okapi_BM25) in the pages of make_task.py."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import bm25s

CORPUS = Path("runs/search/task/data/corpus.txt")


def search(query: str) -> str:
    """Finds the page that matches the words best.

    Args:
        query: the words, which a page should have
    """
    index, pages = _index()
    words = bm25s.tokenize(query, stopwords=None, show_progress=False)
    if not words.vocab:
        return "no words"
    ranked, scores = index.retrieve(words, corpus=pages, k=1, show_progress=False)
    return str(ranked[0, 0]) if scores[0, 0] > 0 else "no page"


@cache
def _index() -> tuple[bm25s.BM25, list[str]]:
    pages = CORPUS.read_text().splitlines()
    # The first word of a page is the name of its person and counts three times; the page only mentions other
    # names.
    weighted = [f"{page} {title} {title}" for page in pages for title in [page.split()[0]]]
    index = bm25s.BM25()
    index.index(bm25s.tokenize(weighted, stopwords=None, show_progress=False), show_progress=False)
    return index, pages
