// The playground: the reader edits v and sees vᵀJ change.
//
// mkdocs_hooks/playground.py puts it into the page, with Jacobians that torch computed:
// for each function a table whose v is all ones, disabled. This module enables it,
// multiplies v by J, and shows which column of J makes an entry of vᵀJ.

const PAUSE = 800 // milliseconds without a change, before a result is read out

customElements.define(
  "vjp-playground",
  class extends HTMLElement {
    connectedCallback() {
      const readOut = reader(this.querySelector("[role=status]"))
      this.querySelectorAll("fieldset:disabled").forEach((e) => play(e, readOut))
    }
  },
)

/** Let the reader play with one function. */
function play(example, readOut) {
  const parts = parse(example)
  const { inputs, lossGradient } = parts
  const state = { v: inputs.map(valueOf), hot: 0, picked: 0 }

  const change = (v) => {
    state.v = v
    state.hot = oneHotAt(v) ?? state.hot
    show(parts, state)
    readOut(inWords(parts))
  }
  const set = (v) => {
    inputs.forEach((input, i) => (input.value = short(v[i])))
    change(v)
  }
  const setOneHot = (i) => {
    const hot = (i + inputs.length) % inputs.length
    set(inputs.map((_, k) => Number(k === hot)))
  }
  const pick = (j) => {
    state.picked = j
    showPicked(parts, state)
  }
  const choices = {
    ones: () => set(inputs.map(() => 1)),
    zeros: () => set(inputs.map(() => 0)),
    "dL/dy": () => set(lossGradient),
    "one-hot": () => setOneHot(state.hot),
    back: () => setOneHot(state.hot - 1),
    on: () => setOneHot(state.hot + 1),
  }
  const edit = (i) => change(state.v.with(i, valueOf(inputs[i])))
  listen(parts, { edit, setOneHot, pick, choices })
  example.disabled = false
  show(parts, state)
}

/** Do what the reader asks for. */
function listen(parts, { edit, setOneHot, pick, choices }) {
  parts.inputs.forEach((input, i) => {
    input.addEventListener("input", () => edit(i))
    input.addEventListener("change", () => (input.value ||= "0"))
    input.addEventListener("focus", () => input.select()) // to type over it
    input.addEventListener("wheel", () => input.blur()) // else scrolling would edit it
  })
  parts.names.forEach((name, i) => name.addEventListener("click", () => setOneHot(i)))
  parts.choices.forEach((button) =>
    button.addEventListener("click", choices[button.value]),
  )
  parts.results.forEach((result, j) => {
    result.addEventListener("focus", () => pick(j))
    result.addEventListener("click", () => pick(j)) // Safari focuses no clicked button
  })
  parts.table.addEventListener("pointerover", ({ target }) => {
    const cell = target.closest("td, th")
    const j = parts.columns.findIndex((cells) => cells.includes(cell))
    if (j >= 0) pick(j)
  })
}

/** Find what an example holds; `columns` are the cells that stand above each other. */
function parse(example) {
  const all = (selector) => [...example.querySelectorAll(selector)]
  const [heads, totals] = all("thead tr")
  const rows = all("tbody tr")
  const data = JSON.parse(example.querySelector("script").textContent)
  return {
    ...data, // jacobian, lossGradient, words
    table: example.querySelector("table"),
    rows,
    columns: data.jacobian[0].map((_, j) => [
      heads.cells[j + 1],
      totals.cells[j + 1],
      ...rows.map((row) => row.cells[j + 2]),
    ]),
    choices: all(".choices button"),
    names: all("tbody button"),
    inputs: all("tbody input"),
    results: all(".results button"),
    sentence: example.querySelector(".words"),
    sum: example.querySelector(".sum td"),
  }
}

/** Show what v is, vᵀJ, and what makes the picked entry of it. */
function show(parts, state) {
  showKind(parts, state)
  parts.results.forEach((result, j) => {
    const value = total(products(parts, state.v, j))
    result.dataset.value = value
    result.textContent = short(value)
    result.setAttribute("aria-label", `${parts.columns[j][0].textContent} ${short(value)}`)
  })
  showPicked(parts, state)
}

function showKind({ words, sentence, choices, names, rows, lossGradient }, { v }) {
  const kind = kindOf(v, lossGradient)
  const hot = oneHotAt(v)
  sentence.innerHTML = words[kind].replace("y[i]", names[hot]?.textContent)
  rows.forEach((row, i) => row.classList.toggle("hot", i === hot))
  for (const choice of choices) {
    if (choice.value in words) choice.setAttribute("aria-pressed", choice.value === kind)
  }
}

function showPicked(parts, { v, picked }) {
  const { rows, columns, results, sum } = parts
  columns.forEach((cells, j) => {
    cells.forEach((cell) => cell.classList.toggle("picked", j === picked))
    results[j].setAttribute("aria-pressed", j === picked)
  })
  products(parts, v, picked).forEach((product, i) => {
    rows[i].classList.toggle("counts", product !== 0)
  })
  sum.textContent = writtenOut(parts, v, picked)
}

/** Say what v is and what vᵀJ is, to be read out. */
function inWords({ sentence, results }) {
  const [v] = sentence.textContent.split(":")
  const entries = results.map((result) => result.getAttribute("aria-label"))
  return `${v}. vᵀJ: ${entries.join(", ")}`
}

/** Write an entry of vᵀJ as the sum of its terms, with the numbers that are shown. */
function writtenOut({ columns, inputs, jacobian, results }, v, j) {
  const name = columns[j][0].textContent
  const numbers = [[results[j].textContent, results[j].dataset.value]]
  const terms = []
  inputs.forEach((input, i) => {
    if (v[i] * jacobian[i][j] === 0) return
    const factors = [input.value, columns[j][i + 2].textContent]
    numbers.push([factors[0], v[i]], [factors[1], jacobian[i][j]])
    terms.push(factors.map(inBrackets).join(" · "))
  })
  if (terms.length === 0) return `${name}: 0, as every term is 0`
  const exact = numbers.every(([text, value]) => isClose(text, value))
  const result = `${exact ? "=" : "≈"} ${numbers[0][0]}`
  // A line breaks before a plus only.
  return `${name}: ${terms.join(" + ")} ${result}`.replace(/ (?!\+)/g, "\u00a0")
}

function inBrackets(text) {
  return text.startsWith("-") ? `(${text})` : text
}

function isClose(text, value) {
  return Math.abs(text - value) <= 1e-12 + 1e-9 * Math.abs(value)
}

function kindOf(v, lossGradient) {
  if (v.every((value) => value === 1)) return "ones"
  if (v.every((value) => value === 0)) return "zeros"
  if (v.every((value, i) => value === lossGradient[i])) return "dL/dy"
  return oneHotAt(v) === undefined ? "weights" : "one-hot"
}

/** Return where v has its 1, if it is 0 elsewhere. */
function oneHotAt(v) {
  const [i, ...others] = [...v.keys()].filter((k) => v[k] !== 0)
  return others.length === 0 && v[i] === 1 ? i : undefined
}

/** Return the terms of entry j of vᵀJ. */
function products({ jacobian }, v, j) {
  return v.map((value, i) => value * jacobian[i][j])
}

function total(terms) {
  return terms.reduce((sum, term) => sum + term, 0)
}

/** Return the number in a field; without one, it counts as 0. */
function valueOf(input) {
  return input.valueAsNumber || 0
}

/** Write a number with four digits, or below 1 with four decimals, at most. */
function short(value) {
  return String(Number(Math.abs(value) < 1 ? value.toFixed(4) : value.toPrecision(4)))
}

/** Return a function that has a text read out, once the reader pauses. */
function reader(status) {
  let timer
  return (text) => {
    clearTimeout(timer)
    timer = setTimeout(() => (status.textContent = text), PAUSE)
  }
}
