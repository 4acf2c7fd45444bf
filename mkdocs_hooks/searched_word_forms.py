"""Search for all forms of a word: "gradients" finds "gradient", "penalize" "penalty".

The theme searches for the words that begin with what was typed, so a plural, or another
form of a verb, found nothing. Where a word's stem begins it, the stem is searched for.
"""

from mkdocs.structure.files import Files

from mkdocs_hooks import search_worker

SHORTEST = 4  # what begins with fewer letters is mostly another word
LINES = {"?r:`${r}*`).join": "?r:`${stemOf(r)}*`).join"}
ADDED = """
function stemOf(word) {
  const lower = word.toLowerCase()
  if (!lunr.stopWordFilter(lower)) return word
  const stem = String(lunr.stemmer(new lunr.Token(lower)))
  return stem.length >= SHORTEST && lower.startsWith(stem) ? stem : word
}
""".replace("SHORTEST", str(SHORTEST))


def on_files(files: Files, **_: object) -> Files:
    """Add the function to the theme's search, and the line that calls it."""
    return search_worker.replace(files, "searched_word_forms.py", LINES, ADDED)
