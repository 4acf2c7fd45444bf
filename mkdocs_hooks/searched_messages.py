"""Make the site's search find a message of torch by the order of its words.

Messages consist of common words, so a search that only counts words finds other pages
for a message, or a page with many messages for everything else. Here a page's score is
multiplied by how many successive words the query shares with one of its tags, plus
`WHOLE` if it is the whole tag, where the result is at least `FEW`: then "grad_output"
finds its page before that of "grad_outputs". `error_wordings.py` and
`jacobian_messages.py` set the tags of the pages of errors; others have them in their
front matter.
"""

from mkdocs.structure.files import Files

from mkdocs_hooks import search_worker

FEW, WHOLE = 3, 20
LINES = {
    # where a query is prepared for lunr
    "search(e){if(": "search(e){let typed=e;if(",
    # where a result gets its score
    "score:a*(1+K(g,2))": (
        "score:a*(1+K(g,2))*timesForMessages(typed,this.map.get(o).tags)"
    ),
}
# The last word may be unfinished, while the reader types.
ADDED = """
function timesForMessages(typed, messages) {
  const words = (text) => text.toLowerCase().match(/[^\\s`'".,:;()[\\]]+/g) || []
  const searched = words(typed)
  let longest = 0
  for (const message of messages || []) {
    const said = words(message)
    for (let i = 0; i < searched.length; i++) {
      for (let j = 0; j < said.length; j++) {
        let n = 0
        while (
          i + n < searched.length && j + n < said.length &&
          (searched[i + n] === said[j + n] ||
            (i + n === searched.length - 1 && said[j + n].startsWith(searched[i + n])))
        ) n++
        const isWhole = n === said.length && n === searched.length &&
          searched[n - 1] === said[n - 1]
        longest = Math.max(longest, isWhole ? n + WHOLE : n)
      }
    }
  }
  return longest < FEW ? 1 : longest
}
""".replace("FEW", str(FEW)).replace("WHOLE", str(WHOLE))


def on_files(files: Files, **_: object) -> Files:
    """Add the function to the theme's search, and the two lines that need it."""
    return search_worker.replace(files, "searched_messages.py", LINES, ADDED)
