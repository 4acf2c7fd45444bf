"""The page on migrating shows what was recorded, and what it says of that is so."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from bs4 import BeautifulSoup

from mkdocs_hooks import recorded_programs

from .pages import a_page
from .tools import ROOT

NAME = "versions/migrating.md"
TEXT = (ROOT / "docs" / NAME).read_text(encoding="utf-8")
OLD, NEWEST = "1.7.1", "2.13.0"
