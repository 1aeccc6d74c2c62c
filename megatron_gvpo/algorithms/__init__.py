"""Methods, each a composition of small blocks without side effects."""
