"""What axe need not look at again, as the same is looked at elsewhere on the page.

It takes seconds for a page of thousands of elements, and most are words of code, or
stand in one of many boxes to unfold that are made of the same parts.
"""

# Marks the boxes that hold, at this width, nothing but what boxes above them hold. Two
# elements are the same if they agree in all that axe goes by: where they stand, their
# tag, attributes, kinds of children, whether they scroll, and whether they are too
# small for a finger. It does not go by what words say, but by whether there are any.
FIND_ALIKE = """() => {
  const free = ["id", "href", "aria-label"]
  const attribute = ({ name, value }) =>
    `${name}=${free.includes(name) || /^data-/.test(name) ? !value.trim() : value}`
  const child = it => it.tagName ?? (it.data.trim() ? "words" : "nothing")
  const scrolls = e => e.scrollWidth > e.clientWidth || e.scrollHeight > e.clientHeight
  const tapped = "a, button, input, select, summary, [tabindex]"
  const isSmall = e => e.matches(tapped) && Math.min(e.offsetWidth, e.offsetHeight) < 24
  const numbers = new Map()
  const number = text => {
    if (!numbers.has(text)) numbers.set(text, numbers.size)
    return numbers.get(text)
  }
  const kinds = new Map([[null, ""]])
  const kind = e => {
    if (!kinds.has(e))
      kinds.set(e, number([
        kind(e.parentElement), e.tagName, [...e.attributes].map(attribute),
        [...new Set([...e.childNodes].map(child))], scrolls(e), isSmall(e),
      ].join(" ")))
    return kinds.get(e)
  }
  const seen = new Set()
  for (const box of document.querySelectorAll("details:not(details details)")) {
    const all = [box, ...box.querySelectorAll("*")].map(kind)
    if (!all.every(it => seen.has(it))) box.isOther = true
    all.forEach(it => seen.add(it))
  }
}"""

# Leaves out the boxes that are alike at each width, what is on other pages, too, and
# all but one of the words of code that are coloured alike.
LEAVE_OUT = """elsewhere => {
  for (const box of document.querySelectorAll("details:not(details details)"))
    if (!box.isOther) box.remove()
  if (elsewhere) document.querySelectorAll(elsewhere).forEach(e => e.remove())
  const style = e => e.tagName + e.className + e.getAttribute("style")
  const worn = e => e ? worn(e.parentElement) + " " + style(e) : ""
  const isPlain = e =>
    !e.children.length && [...e.attributes].every(({ name }) => name === "class")
  const seen = new Set()
  const isSeen = word => {
    const before = seen.has(worn(word))
    seen.add(worn(word))
    return before || !word.textContent.trim()
  }
  const isShown = word => word.getClientRects().length
  const words = [...document.querySelectorAll("pre code span")].filter(isPlain)
  words.filter(isShown).filter(isSeen).forEach(word => {
    word.replaceWith(...word.childNodes)
  })
  document.querySelectorAll("pre code").forEach(code => code.normalize())
}"""
