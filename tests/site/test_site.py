"""Every page of the built site in a real browser: wide and narrow, light and dark.

A page is loaded once, then resized and switched on the spot.
"""

import json
import re
import string
from pathlib import Path
from typing import cast
from urllib.parse import unquote, urldefrag

import pytest
from playwright.sync_api import Browser, Page, ViewportSize, expect

from ..made_once import made_once
from .alike import FIND_ALIKE, LEAVE_OUT
from .browsing import (
    SCHEMES,
    STILL,
    TWO_FRAMES,
    Scheme,
    Server,
    listen,
    listening,
    no_browser,
    pale_text,
    wrong_for_some_readers,
)
from .found_sound import anchors, keep, state_of, was_found_sound

ROOT = Path(__file__).parents[2]
# Text a reader sees that is not code.
PROSE = """() => {
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT)
  const texts = []
  while (walker.nextNode())
    if (!walker.currentNode.parentElement.closest("code, pre, script, style"))
      texts.push(walker.currentNode.data)
  return texts.join("\\n")
}"""
# What a reader can unfold is looked at, too; what loads on scrolling, loads.
SHOW_ALL = """() => {
  document.querySelectorAll("details").forEach(d => { d.open = true })
  document.querySelectorAll("[loading=lazy]").forEach(e => { e.loading = "eager" })
  const shown = [...document.images].map(image => image.decode().catch(() => {}))
  return Promise.all(shown)
}"""
ALL_TABS = ".md-typeset .tabbed-block { display: block !important }"
# What stands on every page of a folder: half of what there is to look at.
SHARED = (
    ".md-header__inner > :not([data-md-component=palette]), .md-tabs li, "
    ".md-sidebar--primary li, .md-footer > *"
)
TEX = re.compile(r"\\[A-Za-z(\[]|\$[^\s$][^$\n]*\$")


def page_urls() -> list[str]:
    """Return the address of every page, as the source files name them."""
    docs = [path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")]
    docs = [path for path in docs if path.parts[0] != "data"]  # mkdocs.yml: no page
    examples = [path.relative_to(ROOT) for path in (ROOT / "examples").glob("*.py")]
    names = [f"{path.with_suffix('').as_posix()}/" for path in docs + examples]
    pages = [re.sub(r"(^|/)index/$", r"\1", name) for name in names]
    # Those on versions, which are the largest, first: no process waits for another.
    return [*sorted(pages, reverse=True), "404.html"]


# The checks: each returns what is wrong.


def wrong_images(page: Page) -> list[str]:
    images = page.evaluate(
        "[...document.images].map("
        "i => [i.outerHTML, i.complete && i.naturalWidth > 0, i.alt])"
    )
    return [
        f"image {'has no alt text' if loaded else 'does not load'}: {tag}"
        for tag, loaded, alt in images
        if not (loaded and alt.strip())
    ]


def wrong_links(page: Page, server: Server) -> list[str]:
    links = page.evaluate("[...document.querySelectorAll('a[href]')].map(a => a.href)")
    return [f"broken link: {link}" for link in links if not link_holds(link, server)]


def link_holds(link: str, server: Server) -> bool:
    """Say whether a link leads to a file and anchor of the site, or is https."""
    if not link.startswith(server.url):
        return re.match(r"https://\w", link) is not None
    address, anchor = urldefrag(link.removeprefix(server.url))
    file = file_of(server.folder, unquote(address))
    return file.is_file() and (not anchor or unquote(anchor) in anchors(file))


def file_of(site: Path, address: str) -> Path:
    """Return the file of a site that a server has at an address."""
    is_folder = address.endswith("/") or not address
    return site / address / "index.html" if is_folder else site / address


def wrong_text(page: Page) -> list[str]:
    return [f"raw TeX: {found}" for found in TEX.findall(page.evaluate(PROSE))]


# The headings that are higher than their words, by a line of something unseen.
EMPTY_LINES = """
() => [...document.querySelectorAll(".md-typeset :is(h1, h2, h3, h4, h5, h6)")].filter(
  heading => {
    const words = document.createRange()
    words.selectNodeContents(heading)
    const link = heading.querySelector(".headerlink")
    if (link) words.setEndBefore(link)
    const below = heading.getBoundingClientRect().bottom
    const size = parseFloat(getComputedStyle(heading).fontSize)
    return below - words.getBoundingClientRect().bottom > size
  }
).map(heading => heading.textContent)
"""


def wrong_layout(page: Page, scheme: Scheme) -> list[str]:
    wrong: list[str] = []
    wide, has = page.evaluate(
        "[document.documentElement.scrollWidth, document.documentElement.clientWidth]"
    )
    if wide > has:
        wrong.append(f"scrolls sideways: {wide} px of content")
    headings = page.evaluate(EMPTY_LINES)
    wrong += [f"an empty line below the heading {it}" for it in headings]
    worn = page.evaluate("document.body.dataset.mdColorScheme")
    if worn != SCHEMES[scheme]:
        wrong.append(f"the scheme is {worn}")
    return wrong


# The styles of the texts that are not too pale, on pages looked at before.
FINE: set[str] = set()


def problems(
    tab: Page, server: Server, url: str, *, with_shared: bool = True
) -> list[str]:
    """Open a page, look at it from all sides, and return what is wrong with it.

    Args:
        tab: Where to open it.
        server: The site.
        url: The page.
        with_shared: Whether axe is to look at what is on all pages of the folder, too.
    """
    tab.goto("about:blank")
    with listening(tab, server) as heard:
        found = seen_problems(tab, server, url, "" if with_shared else SHARED)
    for problem in heard:
        found[problem] = ["while it was open"]
    return [f"/{url} ({', '.join(at)}): {problem}" for problem, at in found.items()]


def seen_problems(
    page: Page, server: Server, url: str, not_for_axe: str
) -> dict[str, list[str]]:
    """Return what is wrong with a page, and from which sides."""
    found: dict[str, list[str]] = {}

    def find(side: str, problems: list[str]) -> None:
        for problem in dict.fromkeys(problems):
            found.setdefault(problem, []).append(side)

    open_whole(page, server.url + url)
    find("from any side", wrong_images(page) + wrong_links(page, server))
    find("from any side", wrong_text(page))
    # From one view to the next only the width changes, or the scheme.
    find("390 px light", wrong_layout(page, "light"))
    page.evaluate(FIND_ALIKE)
    look_from(page, 1280, "light")
    find("1280 px light", wrong_layout(page, "light"))
    page.evaluate(FIND_ALIKE)
    page.evaluate(LEAVE_OUT, not_for_axe)
    # No width changes a colour, and no scheme anything but colours and pictures.
    find("1280 px light", pale_text(page, fine=FINE) + wrong_for_some_readers(page))
    look_from(page, 1280, "dark")
    find("1280 px dark", wrong_layout(page, "dark") + pale_text(page, fine=FINE))
    look_from(page, 390, "dark")
    find("390 px dark", wrong_layout(page, "dark"))
    find("390 px dark", wrong_for_some_readers(page, links=False))
    return found


def open_whole(page: Page, address: str) -> None:
    """Open a page with all that a reader can unfold."""
    look_from(page, 390, "light")
    page.goto(address, wait_until="load")
    page.add_style_tag(content=STILL + ALL_TABS)
    page.evaluate(SHOW_ALL)


def look_from(page: Page, width: int, scheme: Scheme) -> None:
    """Show a page at a width and in a scheme."""
    if page.viewport_size != (size := ViewportSize(width=width, height=800)):
        page.set_viewport_size(size)
    page.emulate_media(color_scheme=scheme)
    page.evaluate(TWO_FRAMES)


# The site


@pytest.mark.parametrize("url", page_urls(), ids=lambda url: f"/{url}")
def test_page(tab: Page, site: Server, url: str) -> None:
    # They are the same on all pages of a folder.
    one_of_folder = {it.partition("/")[0]: it for it in reversed(page_urls())}
    with_shared = url in one_of_folder.values()
    browser = cast(Browser, tab.context.browser)
    file = file_of(site.folder, url)
    state = state_of(file, site.folder, browser.version, str(with_shared))
    if not was_found_sound(url, state):
        wrong = problems(tab, site, url, with_shared=with_shared)
        assert not wrong, "\n".join(wrong)
        keep(url, state)


def test_every_page_is_looked_at(built_site: Path) -> None:
    built = [
        path.relative_to(built_site).as_posix().removesuffix("index.html")
        for path in built_site.rglob("*.html")
    ]
    assert sorted(built) == sorted(page_urls())


@pytest.mark.parametrize(
    "of_page", [r"<title>(.*?)</title>", r'<meta name="description" content="(.*?)">']
)
def test_every_page_says_what_it_is_in_its_head(built_site: Path, of_page: str) -> None:
    seen: dict[str, Path] = {}
    for path in built_site.rglob("*.html"):
        (said,) = re.findall(of_page, path.read_text(encoding="utf-8"))
        assert seen.setdefault(said, path) == path
        assert said.strip()


def test_search_finds_grad_input(page: Page, searchable_site: Server) -> None:
    heard = listen(page, searchable_site)
    page.goto(searchable_site.url)
    page.keyboard.press("/")
    page.keyboard.type("grad_input")
    result = page.locator(".md-search-result__item").first
    expect(result.locator("h1")).to_have_text(
        "What exactly are grad_input and grad_output?"
    )
    tags = result.locator(".md-tags").first  # words to find the page by, not to read
    expect(tags).to_be_attached()
    expect(tags).to_be_hidden()
    assert heard == []


MESSAGES = [
    (
        "GL109",
        "The differentiated Tensor at index 0 appears to not have been used in the "
        "graph. Set allow_unused=True if this is the desired behavior.",
    ),
    ("GL101", "grad can be implicitly created only for scalar outputs"),
    ("GL103", "got 2 tensors and 1 gradients"),
    ("GL104", "'float' object is not iterable"),
    ("GL106", "invalid gradient at index 0 - expected device cpu but got meta"),
    (
        "GL108",
        "element 0 of tensors does not require grad and does not have a grad_fn",
    ),
    (
        "GL108",
        "Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() "
        "instead.",
    ),
    ("GL110", "One of the differentiated Tensors does not require grad"),
    ("GL114", "'Linear' object is not iterable"),
    (
        "GL115",
        "invalid gradient at index 0 - expected layout Strided but got SparseCsr",
    ),
    ("GL300", "The inputs disagree on the number of samples"),
    (
        "GL301",
        "The samples are not independent: the output of one depends on inputs[0] of "
        "another, so there is no dY/dX of each sample.",
    ),
    ("GL302", "output changes with the input in a way that autograd does not see"),
    (
        "GL303",
        "[GL303] output, of shape [8, 2], does not depend on inputs[0]: autograd knows "
        "no way from the one to the other.",
    ),
    ("GL304", "fn gives another output each time it is called with the same inputs"),
    ("GL305", "its first axis must be the batch"),
    ("GL306", "there is no derivative of integers or with respect to them"),
    ("GL307", "torch cannot go back from the output"),
    ("GL308", "The Jacobian takes 3.2 GiB and a pass another 1.5 MiB"),
    *((code, code) for code in [f"GL30{i}" for i in range(9)]),
]
"""Codes, and what torch or gradlib says of the mistakes on their pages."""

VIEW = (
    "is a view and is being modified inplace. This view was created inside a custom "
    "Function (or because an input was returned as-is) and the autograd logic to "
    "handle view+inplace would override the custom backward associated with the custom "
    "Function, leading to incorrect gradients."
)

QUESTIONS = [
    ("what-are-grad-input", "grad_input"),
    ("what-are-grad-input", "grad_output"),
    ("what-are-grad-input", "grad_input grad_output"),
    ("why-does-autograd-grad-need", "grad_outputs"),
    ("why-does-autograd-grad-need", "autograd.grad grad_outputs"),
    ("dy-dx-for-every-sample", "jacobian batch"),
    ("jacobians-in-a-loss|share-or-total", "gradient penalty"),
    ("why-is-grad-none", "None gradient parameter"),
    ("why-is-grad-none", "grad is None"),
    ("why-is-grad-none", "parameter grad is None after backward"),
    ("why-is-grad-none|jacobians-of-parameters", "no gradient for parameter"),
    ("why-is-grad-none", "dying relu"),
    ("why-does-my-hook-not-fire", "hook on frozen BatchNorm"),
    ("gradient-of-an-activation", "gradient with respect to intermediate layer"),
    ("dy-dx-for-every-sample", "per-sample jacobian"),
    ("dy-dx-for-every-sample", "batch jacobian"),
    ("dy-dx-for-every-sample", "jacobian for each sample"),
    ("dy-dx-for-every-sample", "vmap jacrev"),
    ("how-fast", "speed"),
    ("how-fast", "performance"),
    ("how-fast", "faster jacobian"),
    ("which-layer-makes", "gradient explodes"),
    ("residual_network", "skip connection"),
    ("what-are-grad-input|what-is-in-the-tuple", "LSTM grad_input None"),
    ("gradient-of-an-activation", "gradient of intermediate feature map"),
    ("gradient-of-an-activation", "feature map"),
    ("gradient-of-an-activation", "Grad-CAM"),
    ("gradient-of-an-activation", "gradcam"),
    ("gradient-of-an-activation", "gradient of intermediate activation"),
    ("gradient-of-an-activation", "intermediate activation gradient"),
    ("sensitivity_maps|gradient-of-an-activation", "saliency"),
    ("why-does-memory-grow", "memory grows with hooks"),
    ("why-does-memory-grow", "memory leak"),
    ("record-your-model", "record training loop memory"),
    ("can-a-hook-change", "gradient clipping per layer"),
    ("can-a-hook-change", "clip gradient in hook"),
    ("dy-dx-for-every-sample", "jacrev vmap"),
    ("how-do-i-get-dy-dx|dy-dx-for", "gradient of output with respect to input"),
    ("how-do-i-get-dy-dx", "tf.gradients"),
    ("dy-dx-for-every-sample", "jacobian of network output with respect to input"),
    ("dy-dx-for-every-sample", "torch.autograd.functional.jacobian batch"),
    ("what-is-the-gradient-argument", "y.backward gradient"),
    ("what-are-grad-input", "what is grad_output"),
    ("why-does-my-hook-not-fire", "hook called twice"),
    ("gradient-of-an-activation", "feature map gradient"),
    ("when-samples-are-not-independent", "dropout jacobian"),
    ("GL112", "inplace operation error"),
    ("second-derivatives", "HVP"),
    ("second-derivatives", "hessian vector product"),
    ("why-is-grad-none", "freeze"),
    ("why-is-grad-none", "freeze layers"),
    ("why-is-grad-none", "leaf tensor"),
    ("physics_informed_net", "PINN"),
    ("record-your-model", "wandb"),
    ("record-your-model", "debug gradients"),
    ("what-a-recording-cannot-see", "multi gpu"),
    ("why-does-autograd-grad-need", "jvp"),
    ("jacobians-of-parameters", "opacus"),
    ("what-a-recording-cannot-see", "DDP"),
    ("when-samples-are-not-independent", "batch norm per-sample jacobian"),
    ("can-a-hook-change", "scale gradient in hook"),
    ("can-a-hook-change", "change gradient"),
    ("can-a-hook-change", "what may a hook return"),
    ("what-is-the-gradient-argument", "gradient argument"),
    ("gradient-checkpointing", "activation checkpointing"),
    ("why-does-my-hook-not-fire|gradient-checkpointing", "hook fires twice"),
    ("why-does-my-hook-not-fire", f"Output 0 of BackwardHookFunction {VIEW}"),
    (
        "why-does-my-hook-not-fire",
        f"RuntimeError: Output 0 of BackwardHookFunctionBackward {VIEW}",
    ),
    ("why-does-my-hook-not-fire", "compiled model hook not called"),
    ("gradient-checkpointing", "gradient checkpointing"),
    (
        "why-does-my-hook-not-fire",
        "For backward hooks to be called, module output should be a Tensor or a tuple "
        "of Tensors but received <class 'dict'>",
    ),
    (
        "can-a-hook-change",
        "Backward hook returned an invalid number of grad_input, got 4, but expected 1",
    ),
    ("can-a-hook-change", "post accumulate grad hook"),
    ("can-a-hook-change", "order of hooks"),
    ("why-is-grad-none", "freeze layer but let gradient through"),
    ("why-is-grad-none", "does freezing a layer stop the gradient"),
    (
        "own-backward",
        "function CubeBackward returned an incorrect number of gradients (expected 2, "
        "got 1)",
    ),
    (
        "own-backward",
        "trying to differentiate twice a function that was marked with "
        "@once_differentiable",
    ),
    ("own-backward", "custom autograd function"),
    ("own-backward", "needs_input_grad"),
    ("own-backward", "straight-through estimator"),
    ("which-layer-makes", "exploding gradients"),
    ("where-did-the-nan-come-from", "anomaly mode"),
    ("detach-clone-or-data", "detach vs no_grad"),
    (
        "where-did-the-nan-come-from",
        "Function 'SqrtBackward0' returned nan values in its 0th output.",
    ),
    ("second-derivatives", "Laplacian of an image"),
    ("where-did-the-nan-come-from", "sqrt gradient nan"),
    (
        "where-did-the-nan-come-from",
        "how do I find which layer makes NaN in mixed precision",
    ),
    ("why-does-my-hook-not-fire", "why is grad_input[0] None in my full backward hook"),
    ("weights-and-masks", "is_grads_batched"),
    ("weights-and-masks", "is_grads_batched example"),
    ("migrating", "register_backward_hook deprecated"),
    ("migrating", "register_backward_hook deprecated what do I use"),
    ("dy-dx-for-every-sample", "jacobian of a network output w.r.t. input batch slow"),
    ("dy-dx-for-every-sample", "gradient of output wrt input"),
    ("gradient-of-an-activation", "hook on a specific layer of a HuggingFace model"),
    ("own-backward", "how to check my custom backward"),
    ("can-a-hook-change", "gradient clipping and hooks order"),
    ("second-derivatives", "compute Hessian diagonal per sample"),
    ("why-do-gradients-add-up", "difference between retain_graph and create_graph"),
    ("why-is-grad-none", "How to freeze layers"),
    ("GL108", "numpy() on tensor that requires grad"),
    ("why-is-grad-none", "why is grad None"),
    ("jacobians-in-a-loss", "grad penalty"),
    ("can-a-hook-change", "hook order"),
    ("on-a-gpu", "record on a GPU without running out of memory"),
    ("gradient-of-an-activation", "gradient of one layer's output, frozen model"),
    ("what-is-the-gradient-argument", "why does backward need a gradient"),
    ("in-a-trainer", "Lightning"),
    ("in-a-trainer", "pytorch lightning"),
    ("in-a-trainer", "trainer callback"),
    ("in-a-trainer", "Hugging Face Trainer"),
    ("why-does-my-hook-not-fire", "ConvLSTM"),
    ("why-do-gradients-add-up", "do I need retain_graph"),
    (
        "dy-dx-for-every-sample",
        "jacobian of a batch is (B, out, B, in) and mostly zeros",
    ),
    (
        "what-is-the-gradient-argument",
        "why is gradient required for tensor outputs",
    ),
    ("how-do-i-get-dy-dx", "tf.gradients equivalent"),
    ("jacobians-of-parameters", "neural tangent kernel"),
    ("jacobians-of-parameters", "NTK"),
    ("jacobians-of-parameters", "Fisher information"),
    ("share-or-total", "weight tying"),
    ("why-does-my-hook-not-fire", "why is my first layer grad_input None"),
    ("GL110", "only Tensors of floating point dtype can require gradients"),
    ("GL109", "autograd.grad returns None"),
    ("record-your-model", "how to get gradient of each layer"),
    ("record-your-model", "print gradients"),
    ("record-your-model", "check if gradients are flowing"),
    ("where-did-the-nan-come-from", "detect_anomaly"),
    ("where-did-the-nan-come-from", "set_detect_anomaly"),
    ("jacobians-in-a-loss", "WGAN-GP gradient penalty"),
    ("do-two-models-agree", "compare gradients of two models"),
    ("do-two-models-agree", "fp16 vs fp32 gradient difference"),
    ("weights-and-masks", "select one output"),
    ("vjp", "what is vjp"),
    ("migrating", "non-full backward hook warning"),
    ("why-is-grad-none", "loss does not decrease"),
    ("in-a-trainer", "accumulate_grad_batches"),
    ("#install", "license"),
    ("#install", "Jupyter"),
    ("what-is-the-gradient-argument", "Pytorch, what are the gradient arguments"),
    (
        "what-is-the-gradient-argument",
        "Why do we need to pass the gradient parameter to the backward function in "
        "pytorch?",
    ),
    ("what-is-the-gradient-argument", "y.backward(torch.ones_like(y)) meaning"),
    ("can-a-hook-change", "how to do gradient clipping in pytorch"),
    ("can-a-hook-change", "guided backprop"),
    (
        "can-a-hook-see",
        "confusion of when the parameters of module have grad, before execute the "
        "function register_full_backward_hook or after it",
    ),
    ("why-does-my-hook-not-fire", "module.register_full_backward_hook doesn't work"),
    (
        "why-does-my-hook-not-fire",
        "register_full_backward_hook crash if first argument don't require grad",
    ),
    (
        "why-does-my-hook-not-fire",
        "Forward/backward hooks support in DistributedDataParallel",
    ),
    (
        "gradient-of-an-activation",
        "GradCAM: cannot register a hook on a tensor that doesn't require gradient",
    ),
    (
        "gradient-of-an-activation",
        "Why does autograd not produce gradient for intermediate variables?",
    ),
    ("gradient-of-the-input", "gradient of loss with respect to input image"),
    ("gradient-of-the-input", "integrated gradients"),
    ("gradient-of-the-input", "adversarial example"),
    ("gradient-of-the-input", "FGSM"),
    ("dy-dx-for-every-sample", "Batch Jacobian like tf.GradientTape"),
    (
        "dy-dx-for-every-sample",
        "how to compute the divergence of a vector field / trace of the jacobian",
    ),
    ("jacobians-of-parameters", "get individual gradients for each sample in a batch"),
    ("jacobians-in-a-loss", "lipschitz"),
    ("jacobians-in-a-loss", "How to penalize norm of end-to-end Jacobian"),
    ("jacobians-in-a-loss", "penalty on the gradients"),
    (
        "jacobians-in-a-loss",
        "Incorrect R1/R2 penalty because of second order gradients",
    ),
    ("second-derivatives", "double backward"),
    (
        "second-derivatives",
        "How to calculate high order gradient of nn.Module with Non-linear "
        "Activations?",
    ),
    (
        "why-do-gradients-add-up",
        "What does the parameter retain_graph mean in the Variable's backward() "
        "method?",
    ),
    (
        "errors/GL111",
        "Multiple call to backward still works when retain_graph=false, why?",
    ),
    ("errors/GL108", "argmax no gradient"),
    ("why-is-grad-none", "AttributeError: 'NoneType' object has no attribute 'data'"),
    ("why-is-grad-none", "'NoneType' object has no attribute 'zero_'"),
    (
        "detach-clone-or-data",
        "Difference between detach().clone() and clone().detach()",
    ),
    ("detach-clone-or-data", "difference between .data and .detach()"),
    ("do-two-models-agree", "non deterministic gradients"),
    (
        "do-two-models-agree",
        "upsample_bilinear2d_backward_out_cuda does not have a deterministic "
        "implementation, but you set 'torch.use_deterministic_algorithms(True)'",
    ),
    (
        "why-is-grad-none",
        "RuntimeError: Expected to have finished reduction in the prior iteration "
        "before starting a new one. This error indicates that your module has "
        "parameters that were not used in producing loss.",
    ),
    (
        "detach-clone-or-data",
        "RuntimeError: you can only change requires_grad flags of leaf variables.",
    ),
    (
        "detach-clone-or-data",
        "RuntimeError: Inference tensors cannot be saved for backward. To work around "
        "you can make a clone to get a normal tensor and use it in autograd.",
    ),
    (
        "when-samples-are-not-independent",
        "vmap: It looks like you're calling .item() on a Tensor. We don't support vmap "
        "over calling .item() on a Tensor",
    ),
    (
        "when-samples-are-not-independent",
        "During a grad (vjp, jvp, grad, etc) transform, the function provided "
        "attempted to call in-place operation (aten::add_.Tensor) that would mutate a "
        "captured Tensor. This is not supported",
    ),
    (
        "why-does-my-hook-not-fire",
        "RuntimeError: Module backward hook for grad_input is called before the "
        "grad_output one.",
    ),
    ("jacobians-in-a-loss", "derivative for im2col_backward is not implemented"),
    ("why-do-gradients-add-up", "difference between torch.autograd.grad and backward"),
    ("why-do-gradients-add-up", "multiple losses backward"),
    ("errors/GL109", "what does allow_unused do"),
    ("detach-clone-or-data", "how to stop gradient for part of network"),
    ("why-does-my-hook-not-fire", "hook registered after forward"),
    ("why-does-my-hook-not-fire", "Multi-Grad Hooks"),
    ("record-your-model", "how to get gradients of weights per layer"),
    ("can-a-hook-see", "register_forward_hook output changed by inplace relu"),
    ("weights-and-masks", "gradient for only some samples of the batch"),
    ("dy-dx-for-every-sample", "Hutchinson trace estimator"),
    (
        "gradient-checkpointing",
        "RuntimeError: Expected to mark a variable ready only once. This error is "
        "caused by one of the following reasons: 1) Use of a module parameter outside "
        "the `forward` function.",
    ),
    (
        "gradient-checkpointing",
        "torch.utils.checkpoint.CheckpointError: torch.utils.checkpoint: Recomputed "
        "values for the following tensors have different metadata than during the "
        "forward pass.",
    ),
    (
        "gradient-checkpointing",
        "A different number of tensors was saved during the original forward and "
        "recomputation.",
    ),
    ("gradient-checkpointing", "checkpoint DDP"),
    (
        "gradient-checkpointing",
        "None of the inputs have requires_grad=True. Gradients will be None",
    ),
    ("dtype-errors", "RuntimeError: Found dtype Double but expected Float"),
    ("dtype-errors", "RuntimeError: Found dtype Long but expected Float"),
    ("dtype-errors", "expected scalar type Half but found Float"),
    (
        "dtype-errors",
        "Index put requires the source and destination dtypes match, got Float for the "
        "destination and Half for the source.",
    ),
    ("dtype-errors", "dtype of gradient"),
    ("gradient-of-the-input", "smoothgrad"),
    ("second-derivatives", "hessian of the parameters"),
    ("second-derivatives", "gradient of a gradient"),
    ("second-derivatives|jacobians-in-a-loss", "power iteration"),
    ("where-did-the-nan-come-from", "gradient underflow float16"),
    ("gradient-checkpointing", "checkpoint_sequential"),
    ("gradient-accumulation", "gradient accumulation no_sync"),
    ("gradient-of-the-input", "PGD attack"),
    ("errors/GL111", "hidden state rnn backward second time"),
    ("errors/GL112", "version counter"),
    ("wrong-derivatives", "relu gradient at 0"),
    ("wrong-derivatives", "gradient of max"),
    ("wrong-derivatives", "abs gradient at zero"),
    (
        "migrating",
        "Cannot use both regular backward hooks and full backward hooks on a single "
        "Module. Please use only one of them.",
    ),
    ("what-is-the-gradient-argument", "loss.grad is constant 1"),
]
"""Pages, and what somebody types who needs one."""

LEFT_OUT = [
    ("what may I do with hooks", "hooks"),
    ("HOW DO I clip", "clip"),
    ("jacobian of y w.r.t. x", "jacobian y respect x"),
]
"""What somebody types, and the same without its common words."""

# Asks the theme's search, as the box does.
SEARCH = """async (every) => {
    const of = (type) => new Promise((resolve) => {
        worker.onmessage = ({ data }) => data.type === type && resolve(data.data)
    })
    const { base, search } = JSON.parse(document.getElementById("__config").textContent)
    const worker = new Worker(new URL(search, location))
    const index = await (await fetch(`${base}/search/search_index.json`)).json()
    let answer = of(1)
    worker.postMessage({ type: 0, data: { ...index, options: {} } })
    await answer
    const found = {}
    for (const words of every) {
        answer = of(3)
        worker.postMessage({ type: 2, data: words })
        found[words] = (await answer).items.map((item) => item[0].location)
    }
    return found
}"""


@pytest.fixture(scope="module")
def found(
    request: pytest.FixtureRequest,
    built_site: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, list[str]]:
    """The pages found for whatever the tests look for: the index is read once."""

    def search(answers: Path) -> None:
        browser: Browser = request.getfixturevalue("browser")
        words = [words for _, words in MESSAGES + QUESTIONS]
        server, page = Server(built_site), browser.new_page()
        heard = listen(page, server)
        page.goto(server.url)
        words += [words for pair in LEFT_OUT for words in pair]
        every = [*words, *string.ascii_lowercase, *string.digits]
        answers.write_text(json.dumps(page.evaluate(SEARCH, every)))
        assert heard == []
        page.close()
        server.close()

    return json.loads(made_once("found.json", search, tmp_path_factory).read_text())


@pytest.mark.parametrize(("code", "message"), MESSAGES)
def test_search_finds_the_page_of_a_message(
    found: dict[str, list[str]], code: str, message: str
) -> None:
    assert re.search(f"errors/{code}/", found[message][0])


@pytest.mark.parametrize(("page_found", "words"), QUESTIONS)
def test_search_finds_the_page_of_a_question(
    found: dict[str, list[str]], page_found: str, words: str
) -> None:
    assert re.search(f"(^|/)({page_found})", found[words][0])


@pytest.mark.parametrize(("asked", "meant"), LEFT_OUT)
def test_search_leaves_out_common_words(
    found: dict[str, list[str]], asked: str, meant: str
) -> None:
    assert found[asked] == found[meant] != []


@pytest.mark.parametrize("character", string.ascii_lowercase + string.digits)
def test_search_finds_what_begins_with_any_character(
    found: dict[str, list[str]], character: str
) -> None:
    assert found[character]


def test_the_button_in_the_header_switches_the_scheme(page: Page, site: Server) -> None:
    page.goto(site.url)
    for name, scheme in [("Switch to light", "default"), ("Switch to dark", "slate")]:
        page.locator(f"label[title*='{name}']").click()
        expect(page.locator("body")).to_have_attribute("data-md-color-scheme", scheme)


def test_a_phone_breaks_printed_sentences_at_its_own_width(
    page: Page, site: Server
) -> None:
    open_whole(page, site.url + "errors/GL306/")
    message = page.locator(".sentences:has(.again)").first
    code = message.locator("xpath=ancestor::code")
    inside = "(message, code) => message.scrollWidth <= code.clientWidth"
    assert message.evaluate(inside, code.element_handle())
    assert message.inner_text().split().count("#>") == 1
    look_from(page, 1280, "light")
    lines = message.inner_text().split("\n")
    assert [line.split()[0] for line in lines] == ["#>"] * len(lines)
    assert len(lines) > 1


def test_a_phone_folds_long_lines_of_code(page: Page, site: Server) -> None:
    fits = "all => all.every(it => it.scrollWidth <= it.clientWidth)"
    for url in "versions/migrating/", "errors/GL101/":
        open_whole(page, site.url + url)
        code = page.locator("pre > code:has(.folds)")
        assert code.count() > 2
        assert code.evaluate_all(fits)
    line = page.locator(".folds", has_text="requires_grad=True").first
    whole = line.inner_text()
    height = "it => it.getBoundingClientRect().height"
    folded = line.evaluate(height)
    look_from(page, 1280, "light")
    assert folded > 1.5 * line.evaluate(height)
    assert line.inner_text() == whole


def test_paper_is_light_and_has_room_for_all(page: Page, site: Server) -> None:
    look_from(page, 606, "dark")  # as wide as A4 between its margins
    page.goto(site.url + "guide/how-fast/")
    page.emulate_media(media="print")
    assert pale_text(page, ".md-content") == []
    drawn = "[...document.images].map(i => getComputedStyle(i).filter)"
    assert set(page.evaluate(drawn)) == {"none"}
    margins = "getComputedStyle(document.documentElement).colorScheme"
    assert page.evaluate(margins) == "light only"
    wide = page.locator(".wide")
    assert wide.count() > 9
    cut = "all => all.some(it => it.scrollWidth > it.clientWidth)"
    assert not wide.evaluate_all(cut)
    code = page.locator("article > .highlight pre > code").first
    code.evaluate("it => { it.textContent = 'x'.repeat(88) }")
    lines = "it => { const all = document.createRange(); all.selectNodeContents(it);"
    assert code.evaluate(f"{lines} return all.getClientRects().length }}") == 1
    expect(page.locator(".md-code__nav").first).to_be_hidden()


def test_the_keyboard_shows_where_it_is_in_the_header(page: Page, site: Server) -> None:
    page.goto(site.url)
    for at in ".md-header__button.md-logo", ".md-tabs__link":
        page.locator(at).first.focus()
        page.keyboard.press("Shift+Tab")
        page.keyboard.press("Tab")
        ring = page.evaluate(
            "getComputedStyle(document.activeElement).outlineColor"
            " == getComputedStyle(document.activeElement).color"
        )
        assert ring, at


# The checks bite: breaks are put into an otherwise sound page.

SOUND = """<!doctype html>
<html lang="en"><head><title>A page</title>
<meta name="viewport" content="width=device-width">
<link rel="icon" href="data:,"></head>
<body><main><h1>A page</h1>BREAK</main><script>
const dark = matchMedia("(prefers-color-scheme: dark)")
const name = () => dark.matches ? "slate" : "default"
dark.onchange = () => document.body.dataset.mdColorScheme = name()
dark.onchange()
</script></body></html>"""
PICTURE = "data:image/svg+xml,<svg xmlns='http://www.w3.org/2000/svg'/>"
# Those that do not disturb each other stand on one page.
TOGETHER = {
    "console": ("<script>console.error('oh')</script>", "console: oh"),
    "exception": ("<script>nosuch()</script>", "exception: nosuch is not defined"),
    "another host": (
        '<img alt="a" src="http://gradlib.invalid/a.png">',
        r"request to another host: http://gradlib\.invalid/a\.png",
    ),
    "404": ('<script src="missing.js"></script>', r"404 for http\S*/missing\.js"),
    "missing image": (
        '<img alt="a" src="no.png">',
        r"\(from any side\): image does not load: <img alt=\"a\" src=\"no",
    ),
    "no alt": (
        f'<img src="{PICTURE}">',
        r"\(from any side\): image has no alt text: <img src",
    ),
    "empty alt": (f'<img alt="" src="{PICTURE}">', "image has no alt text: <img alt"),
    "missing page": (
        '<a href="missing/">there</a>',
        r"\(from any side\): broken link: http\S*/missing/$",
    ),
    "missing anchor": (
        '<a href="#missing">there</a>',
        r"\(from any side\): broken link: http\S*/#missing$",
    ),
    "http link": (
        '<a href="http://gradlib.invalid/">there</a>',
        r"\(from any side\): broken link: http://gradlib\.invalid/$",
    ),
    "command": (r"<p>\frac{1}{2}</p>", r"raw TeX: \\f"),
    "dollars": ("<p>is $x^2$ here</p>", r"raw TeX: \$x\^2\$"),
    "missing image, far below": (
        '<img alt="a" loading="lazy" style="margin-top: 9000px" src="no2.png">',
        r"\(from any side\): image does not load: .*no2\.png",
    ),
    "another host, far below": (
        '<iframe title="a" loading="lazy" style="margin-top: 9000px"'
        ' src="http://gradlib.invalid/b"></iframe>',
        r"request to another host: http://gradlib\.invalid/b",
    ),
    "contrast": (
        '<p style="color: #aaa">faint</p>',
        r"\(1280 px light, 1280 px dark\): axe color-contrast: <p style",
    ),
    "label": ("<input>", r"\(1280 px light, 390 px dark\): axe label: <input"),
    "link like its text": (
        '<p>Read on <a href="" style="color: #222; text-decoration: none">there</a>',
        r"\(1280 px light\): axe link-in-text-block: <a href=\"\" style",
    ),
}
ALONE = {
    "wide": (
        '<p style="width: 600px">wide</p>',
        "(390 px light, 390 px dark): scrolls sideways: 6",
    ),
    "folded": (
        '<details><summary>More</summary><p style="width: 600px">wide</details>',
        "(390 px light, 390 px dark): scrolls sideways: 6",
    ),
    "second tab": (
        '<div class="md-typeset"><div class="tabbed-block" style="display: none">'
        '<p style="width: 600px">wide</div></div>',
        "(390 px light, 390 px dark): scrolls sideways: 6",
    ),
    "contrast in the dark": (
        "<style>[data-md-color-scheme=slate] p { color: #aaa }</style><p>faint",
        "(1280 px dark): axe color-contrast",
    ),
    "label on a phone": (
        "<style>@media (min-width: 400px) { input { display: none } }</style><input>",
        "(390 px dark): axe label",
    ),
    "contrast of some only": (
        "<p>dark</p><p style='color: #aaa'>faint</p>",
        "(1280 px light, 1280 px dark): axe color-contrast",
    ),
    "code of another kind": (
        "<style>.s { color: #222 } .s .n { color: #aaa }</style><pre><code>"
        "<span class=n>dark</span> <span class=s>dark</span>"
        " <span class=s><span class=n>faint</span></span> <span class=n>dark</span>",
        "(1280 px light, 1280 px dark): axe color-contrast",
    ),
    "scheme": (
        "<script>onload = () => dark.onchange = null</script>",
        "(1280 px dark, 390 px dark): the scheme is default",
    ),
}


def test_a_sound_page_passes(tab: Page, small_site: Server) -> None:
    (small_site.folder / "index.html").write_text(SOUND.replace("BREAK", ""))
    assert problems(tab, small_site, "") == []


def test_the_checks_bite(tab: Page, small_site: Server) -> None:
    broken = "".join(it for it, _ in TOGETHER.values())
    (small_site.folder / "index.html").write_text(SOUND.replace("BREAK", broken))
    found = problems(tab, small_site, "")
    unseen = [
        name
        for name, (_, message) in TOGETHER.items()
        if not any(re.search(message, problem) for problem in found)
    ]
    assert not unseen, "\n".join(found)


@pytest.mark.parametrize(("broken", "message"), ALONE.values(), ids=ALONE.keys())
def test_a_check_bites(
    tab: Page, small_site: Server, broken: str, message: str
) -> None:
    (small_site.folder / "index.html").write_text(SOUND.replace("BREAK", broken))
    found = problems(tab, small_site, "")
    assert any(message in problem for problem in found), found


BOX = "<details><summary>More</summary><p><a href='' style='{}'>there</a>{}</details>"
ROOM = "display: block; padding: 1em"
IN_A_LATER_BOX = {
    "label": (BOX.format(ROOM, "<input>"), "axe label"),
    "list": (BOX.format(ROOM, "<ul><div>it</div></ul>"), "axe list"),
    "name": (BOX.format(ROOM, "").replace("there", " "), "axe link-name"),
    "contrast": (BOX.format(ROOM + "; color: #aaa", ""), "axe color-contrast"),
    "scrolls": (
        BOX.format(
            ROOM, "<div style='overflow: auto; height: 30px'><p>a<p>b<p>c</div>"
        ),
        "axe scrollable-region-focusable",
    ),
}


def test_boxes_that_are_alike_are_left_out(tab: Page, small_site: Server) -> None:
    boxes = BOX.format(ROOM, "") * 3
    (small_site.folder / "index.html").write_text(SOUND.replace("BREAK", boxes))
    assert problems(tab, small_site, "") == []
    assert tab.locator("details").count() == 1


def test_a_box_is_left_out_only_if_it_is_like_others(
    tab: Page, small_site: Server
) -> None:
    boxes = BOX.format(ROOM, "") * 3
    boxes += "".join(broken for broken, _ in IN_A_LATER_BOX.values())
    (small_site.folder / "index.html").write_text(SOUND.replace("BREAK", boxes))
    found = "\n".join(problems(tab, small_site, ""))
    assert [it for _, it in IN_A_LATER_BOX.values() if it not in found] == [], found


LIKE_BUT_FOR_A_LENGTH = {
    "scrolls": (
        "pre { width: 300px; overflow: auto }",
        "<pre>{}</pre>",
        "wide " * 99,
        "(1280 px light, 390 px dark): axe scrollable-region-focusable",
    ),
    "small": (
        "a { display: inline-block; height: 30px }",
        "<p><a href=''>{0}</a><a href=''>{0}</a>",
        "i",
        "(1280 px light, 390 px dark): axe target-size",
    ),
    "small on a phone": (
        "a { display: inline-block; height: 30px; font-size: 2vw }",
        "<p><a href=''>{0}</a><a href=''>{0}</a>",
        "the",
        "(390 px dark): axe target-size",
    ),
    "small where it is wide": (
        "a { display: inline-block; height: 30px; font-size: calc(20px - 1vw) }",
        "<p><a href=''>{0}</a><a href=''>{0}</a>",
        "there",
        "(1280 px light): axe target-size",
    ),
}


@pytest.mark.parametrize(
    ("style", "part", "words", "message"),
    LIKE_BUT_FOR_A_LENGTH.values(),
    ids=LIKE_BUT_FOR_A_LENGTH.keys(),
)
def test_a_box_is_like_others_if_it_can_be_used_as_they_can(
    tab: Page, small_site: Server, style: str, part: str, words: str, message: str
) -> None:
    fine, other = (
        f"<details><summary>More</summary>{part.format(it)}</details>"
        for it in ("here and there", words)
    )
    page = SOUND.replace("BREAK", f"<style>{style}</style>{fine}{fine}BREAK")
    (small_site.folder / "sound.html").write_text(page.replace("BREAK", ""))
    assert problems(tab, small_site, "sound.html") == []
    (small_site.folder / "index.html").write_text(page.replace("BREAK", other))
    found = problems(tab, small_site, "")
    assert any(message in problem for problem in found), found


def test_what_pages_share_is_looked_at_once(tab: Page, small_site: Server) -> None:
    broken = (
        '<ul class="md-sidebar--primary"><li><a href="no/">no</a><input></ul>'
        '<div class="md-header"><a href="no2/">no</a><p style="width: 600px">wide</div>'
    )
    (small_site.folder / "index.html").write_text(SOUND.replace("BREAK", broken))
    found = " ".join(problems(tab, small_site, ""))
    assert "no/" in found
    assert "axe label" in found
    less = " ".join(problems(tab, small_site, "", with_shared=False))
    assert "no/" in less
    assert "no2/" in less
    assert "scrolls sideways" in less
    assert "axe" not in less


def test_without_a_browser_ci_fails_and_others_skip(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="apt-get install chromium"):
        no_browser()
    monkeypatch.delenv("CI")
    with pytest.raises(pytest.skip.Exception, match="apt-get install chromium"):
        no_browser()
