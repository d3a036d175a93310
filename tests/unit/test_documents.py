"""The generated pages of docs/ say what the code says."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from freetoken.cli import document

DOCS = Path(document.__file__).resolve().parents[2] / "docs"


@pytest.mark.parametrize("page", sorted(document.PAGES))
def test_a_generated_page_is_up_to_date(page: str) -> None:
    if page == "cli.md" and sys.version_info[:2] != (3, 11):
        pytest.skip("argparse words its help differently in other versions than 3.11")
    assert (DOCS / page).read_text() == document.PAGES[page](), "run `make docs`"
