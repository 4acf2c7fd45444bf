// Hooks by version: the reader picks a module, a hook and a build of torch.
//
// mkdocs_hooks/hook_versions.py puts tables of all recordings into the page. An anchor
// in them, as #linear-3d/legacy/1.7.1, stands for what one hook got in one build. This
// module shows one at a time, and takes the anchors: a link then leads to the slider.

customElements.define(
  "hook-picker",
  class extends HTMLElement {
    connectedCallback() {
      if (this.querySelector("form[hidden]")) start(this)
    }
  },
)

function start(picker) {
  const form = picker.querySelector("form")
  const shown = picker.querySelector("section")
  const ticks = [...form.querySelectorAll(".ticks i")]
  const builds = ticks.map((tick) => tick.textContent)
  const places = takeAnchors()

  const show = () => {
    const { module, hook, torch } = form.elements
    const series = builds.map((build) => `${module.value}/${hook.value}/${build}`)
    const at = torch.valueAsNumber
    const place = places.get(series[at])
    const rows = series.map((name) => places.get(name).closest("tr"))
    const isFirst = rows[at - 1] !== rows[at]
    ticks.forEach((tick, i) => {
      tick.classList.toggle("change", isChange(rows, i))
      tick.classList.toggle("here", i === at)
    })
    form.querySelector("output").textContent = builds[at]
    const compared = comparison(rows, at, builds)
    torch.setAttribute("aria-valuetext", inWords(builds[at], rows[at], compared))
    const about = document.getElementById(module.value).querySelector(".about")
    shown.replaceChildren(
      about.cloneNode(true),
      ...parts(place, isFirst),
      ...onGpu(places, series[at]),
      foot(series[at], compared),
    )
  }
  const go = () => {
    const name = decodeURIComponent(location.hash.slice(1))
    if (!places.has(name)) return
    const [module, hook, build] = name.split("/")
    form.elements.module.value = module
    form.elements.hook.value = hook
    form.elements.torch.value = builds.indexOf(build)
    show()
    picker.scrollIntoView()
  }
  form.addEventListener("input", show)
  form.addEventListener("change", () => {
    history.replaceState(null, "", shown.querySelector("a").hash)
  })
  window.addEventListener("hashchange", go)
  form.hidden = shown.hidden = false
  show()
  go()
}

/** Return the anchors of all builds by name; a link no longer leads to the tables. */
function takeAnchors() {
  const anchors = [...document.querySelectorAll(".hook-cases span[data-torch]")]
  const places = new Map(anchors.map((anchor) => [anchor.id, anchor]))
  anchors.forEach((anchor) => anchor.removeAttribute("id"))
  return places
}

/** Tell whether a build differs from the one before, which had the hook. */
function isChange(rows, i) {
  return i > 0 && rows[i - 1] !== rows[i] && rows[i].classList.contains("change")
}

/** Say how a build compares with the one before. */
function comparison(rows, at, builds) {
  if (at === 0) return "the oldest release here"
  if (rows[at - 1] === rows[at]) return `as in torch ${builds[at - 1]}`
  if (isChange(rows, at)) return `not as in torch ${builds[at - 1]}`
  return "the first release here with this hook"
}

/** Say what the slider stands on, to be read out. */
function inWords(build, row, compared) {
  const cell = row.cells[1]
  const count = cell.querySelector(".count")?.firstChild.data.trim()
  return `${build}: ${count ? `${count} in grad_input` : cell.textContent}, ${compared}`
}

/** Return what one build gave: both tuples, messages, and the last node. */
function parts(place, isMarked) {
  const row = place.closest("tr")
  const heads = [...row.closest("table").tHead.rows[0].cells]
  const cells = [...row.cells]
  const tuples = element("div", "tuples")
  let column = 1
  for (const cell of cells.slice(1, -1)) {
    const tuple = element("div", cell.className)
    if (cell.colSpan === 1) tuple.append(element("h4", "", heads[column].textContent))
    tuple.append(...copies(cell))
    tuples.append(tuple)
    column += cell.colSpan
  }
  if (!isMarked) tuples.querySelectorAll(".changed").forEach((mark) => mark.remove())
  const said = element("div", "messages")
  const isSaid = ({ dataset }) => dataset.torch.split(" ").includes(place.dataset.torch)
  said.append(...copies(cells.at(-1)).filter(isSaid))
  said.querySelectorAll("summary span").forEach((span) => span.remove())
  const { node } = place.dataset
  const last = element("p", "node", "Last autograd node: ")
  last.append(element("code", "", node))
  return node ? [tuples, said, last] : [tuples, said]
}

/** Return what a build gave on a GPU, if any build was run on one. */
function onGpu(places, name) {
  if (!document.querySelector(".hook-cases tr.gpu")) return []
  const place = places.get(`${name}/cuda`)
  const head = element("p", "device", "On a GPU")
  if (!place) return [head, element("p", "none", "This release was not run on one.")]
  return [head, ...parts(place, true)]
}

/** Return what stands below: the build, and a link. */
function foot(name, compared) {
  const link = element("a", "", `#${name}`)
  link.href = `#${name}`
  const shown = element("p", "foot", `torch ${name.split("/")[2]}, ${compared}. Link: `)
  shown.append(link)
  return shown
}

function copies(cell) {
  return [...cell.cloneNode(true).childNodes]
}

function element(tag, className, text = "") {
  const made = document.createElement(tag)
  made.className = className
  made.textContent = text
  return made
}
