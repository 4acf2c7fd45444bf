"""How much memory a backward pass takes, from the drawing of its graph."""

from collections import defaultdict

from gradlib.jacobian.drawing import Drawing, kept_for_each


@kept_for_each
def bytes_of_graph(drawing: Drawing) -> int:
    """Return how many bytes the graph of a backward pass keeps, at most.

    Each of its operations may save the gradient it was given, as a product does whose
    factors both require grad.
    """
    return sum(form.bytes for form in drawing.forms.values())


@kept_for_each
def bytes_of_pass(drawing: Drawing) -> int:
    """Return how many bytes of gradients one backward pass holds at its peak.

    This goes through the graph as autograd does, the node made last first and only
    nodes that lead to an end, and counts the gradients waiting at nodes that have not
    run.
    """
    led, forms = drawing.led, drawing.forms
    come = set(drawing.roots)
    held: dict[int, int] = defaultdict(int)
    for spot in come:
        held[spot[0]] += forms[spot].bytes
    peak = total = sum(held.values())
    for node in drawing.order:
        if not led[node]:
            continue
        given = more = 0
        for spot in set(led[node]):
            size = forms[spot].bytes
            given += size
            # A gradient that has reached an end does not wait.
            if spot not in come and led[spot[0]]:
                come.add(spot)
                held[spot[0]] += size
                more += size
        # An operation holds its incoming and outgoing gradients at the same time.
        peak = max(peak, total + given)
        total += more - held[node]
    return peak
