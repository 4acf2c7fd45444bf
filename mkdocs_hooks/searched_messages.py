"""Make the site's search find a page by the messages and questions in its tags.

Messages consist of common words, so a search that only counts words finds other pages
for a message, or a page with many messages for everything else. Here a page's score is
multiplied by what the query shares with one of its tags, whichever is most:

- how many successive words, where they are at least `FEW`, and `WHOLE` more if they are
  all of both: then "grad_output" finds its page before that of "grad_outputs";
- in whatever form and order, all words of the tag but the common ones: how many, and
  `WITHIN` more, or `ALL` if the query has no others. Then "how to clip gradients" finds
  the page with the tag "gradient clipping". One word alone counts only for a query that
  has no others.

`error_wordings.py` and `jacobian_messages.py` set the tags of the pages of errors;
others have them in their front matter.
"""

from mkdocs.structure.files import Files

from mkdocs_hooks import search_worker

FEW, WHOLE, WITHIN, ALL = 3, 20, 4, 12
LINES = {
    # where a query is prepared for lunr
    "search(e){if(": "search(e){let typed=e;if(",
    # where a result gets its score
    "score:a*(1+K(g,2))": (
        "score:a*(1+K(g,2))*timesForMessages(typed,this.map.get(o).tags)"
    ),
}
# The last word may be unfinished, while the reader types.
FUNCTIONS = """
function timesForMessages(typed, messages) {
  const shared = (messages || []).map(message =>
    Math.max(sharedWords(wordsOf(typed), wordsOf(message)),
      sharedForms(formsOf(typed), formsOf(message))))
  return Math.max(1, ...shared)
}
function wordsOf(text) {
  return text.toLowerCase().match(/[^\\s`'".,:;()[\\]]+/g) || []
}
function sharedWords(searched, said) {
  let longest = 0
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
  return longest < FEW ? 0 : longest
}
function formsOf(text) {
  const words = text.toLowerCase().match(/[^\\s`'".,:;()[\\]?!=\\/-]+/g) || []
  const telling = words.filter(word =>
    lunr.stopWordFilter(word) && word !== "pytorch" && word !== "torch")
  return new Set(telling.map(word => lunr.stemmer(new lunr.Token(word)).toString()))
}
function sharedForms(searched, said) {
  if (!said.size || [...said].some(form => !searched.has(form))) return 0
  if (said.size === searched.size) return said.size + ALL
  return said.size > 1 ? said.size + WITHIN : 0
}
"""
ADDED = f"""
const FEW = {FEW}, WHOLE = {WHOLE}, WITHIN = {WITHIN}, ALL = {ALL}
{FUNCTIONS}"""


def on_files(files: Files, **_: object) -> Files:
    """Add the functions to the theme's search, and the two lines that need them."""
    return search_worker.replace(files, "searched_messages.py", LINES, ADDED)
