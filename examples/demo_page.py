"""The page of demo.py: its numbers as one self-contained HTML file. Nothing is computed here.

``page(numbers)`` takes what report.json holds.
"""

from __future__ import annotations

import html
import itertools
from typing import Any

from equilibria.evaluation.page import (
    Line,
    bars,
    chart,
    figure,
    percent,
    picture,
    proof_words,
    section,
    shell,
    small,
    tiles,
)


def opening(n: dict[str, Any]) -> str:
    digit, layers = n["digit"], n["solve"]["layers"]
    sure = percent(digit["probabilities"][digit["label"]], 2)
    right = "right" if digit["label"] == digit["truth"] else f"wrong: it is a {digit['truth']}"
    proven = all(layer["unique"] for layer in layers)
    bounds = zip(n["error_bounds"].values(), layers, strict=True)
    off = max(bound / layer["length"] for bound, layer in bounds)
    proof = (
        "Each problem provably has exactly one answer, and what was computed is off by at most "
        f"{small(100 * off)}% of its length. That is a theorem, checked for these weights and this "
        "picture, not a statistic."
        if proven
        else "For this picture it is not proven that there is only one answer."
    )
    return f"""<h1>What the network saw in one handwritten {digit["truth"]}, and why to believe
it</h1>
<div class="hero">{picture(digit["picture"], f"A handwritten {digit['truth']}, 8 by 8 pixels")}
<p>An ordinary network pushes a picture through a fixed stack of layers. This one <em>solves a
problem</em> instead: it looks for the state in which nothing wants to change any more, an
<strong>equilibrium</strong>. That state is its answer.</p></div>
<div class="short"><p><strong>What it did.</strong> It solved {len(layers)} minimization problems
with {" and ".join(f"{layer['unknowns']:,}" for layer in layers)} unknowns and read the picture as
a <strong>{digit["label"]}</strong> ({right}).</p>
<p><strong>How sure it is.</strong> {sure}. Over {n["test_digits"]} digits that it had never seen,
{percent(n["networks"]["GEQ"]["metrics"]["accuracy"])} of its answers are right.</p>
<p><strong>Why to believe it.</strong> {proof}</p></div>"""


def solve(n: dict[str, Any]) -> str:
    found = n["solve"]
    count, layers = found["starts"], found["layers"]
    falls = apart = ""
    for i, layer in enumerate(layers):
        paths, minimum = layer["objective"], layer["minimum"]
        steps = len(paths[0]) - 1
        runs = [
            Line(f"{count} random starts" if k == 0 else "", "a", list(enumerate(path)), thin=True)
            for k, path in enumerate(paths)
        ]
        least = Line("minimum", "b", [(0, minimum), (steps, minimum)], dash=True)
        left = max(path[-1] for path in paths) - minimum
        falls += figure(
            chart(
                [*runs, least],
                alt=f"Problem {i + 1}: the objective falls from {count} random starts to the same "
                f"minimum, {minimum:.2f}",
                xlabel="step",
                ylabel="objective",
            ),
            f"Problem {i + 1}. After {steps} steps all {count} are within {small(left)} of the "
            f"minimum, {minimum:,.2f}.".replace("-", "−"),
        )
        seen = [(k, d) for k, d in enumerate(layer["apart"]) if d > 0]
        rate = layer["contraction"]
        promise = [(k, layer["apart"][0] * rate**k) for k, _ in seen]
        apart += figure(
            chart(
                [
                    Line("measured", "a", seen),
                    Line("proven: at most this", "b", promise, dash=True),
                ],
                alt=f"Problem {i + 1}: the largest distance between two runs falls from "
                f"{layer['apart'][0]:.3g} to {layer['apart'][-1]:.1e}, below the proven line",
                xlabel="step",
                ylabel="distance between the runs",
                log=True,
            ),
            f"Problem {i + 1}. Proven: each step leaves at most {percent(rate)} of the distance. "
            "Measured: it shrinks faster.",
        )
    falling = all(
        after <= before + 1e-9 * abs(before)
        for layer in layers
        for path in layer["objective"]
        for before, after in itertools.pairwise(path)
    )
    same = len(set(found["labels"])) == 1
    ends = " and ".join(small(layer["apart"][-1]) for layer in layers)
    return section(
        "solve",
        "1 · what it solved",
        "Downhill to the lowest point",
        f"""<p>Each problem gives every possible state a number, the <strong>objective</strong>: low
where the state fits the picture and what the network has learned, high elsewhere. To answer is to
find the lowest point. Below, this is done {count} times, each time from another random
state.{" At no step did the objective rise." if falling else ""}</p><div class="two">{falls}</div>
<p>Do the {count} runs only reach the same height, or the same point? The same point: at the end
the two that are farthest apart differ by {ends}, in states of length
{" and ".join(f"{layer['length']:.1f}" for layer in layers)}. The label read from all {count} is
{f"the same, <strong>{found['labels'][0]}</strong>" if same else "not the same"}.</p>
<div class="two">{apart}</div>
<p class="note">Drawn with the plain method and in double precision, so that the rule at work is
visible; in the first two pictures with steps of a quarter of the usual length. The network itself
uses a faster method (Anderson acceleration) and needs
{" and ".join(f"{s:.1f}" for s in n["networks"]["GEQ"]["steps"])} steps on average.</p>""",
    )


def proof(n: dict[str, Any]) -> str:
    layers = n["solve"]["layers"]
    bounds = list(n["error_bounds"].values())
    unique = all(layer["unique"] for layer in layers)
    contracts = all(layer["contraction"] < 1 for layer in layers)
    worst = max(layer["contraction"] for layer in layers)
    kind = "contraction" if unique and contracts else "strong convexity" if unique else "none"
    words = proof_words(kind, worst)
    if kind == "contraction":
        words = f"""<p>{n["solve"]["starts"]} runs are evidence, not a proof. Here is the
proof:</p>{words}"""
    rows = ""
    for i, (layer, bound) in enumerate(zip(layers, bounds, strict=True)):
        rows += f"""<dt>Problem {i + 1}: {html.escape(layer["kind"].replace("_", " "))}</dt>
<dd>A step leaves at most the share ρ = {layer["contraction"]:.4f} of any distance.</dd>
<dd>The objective G curves upwards by at least m = {layer["modulus"]:.4f} and at most
L = {layer["smoothness"]:.4f} in every direction (its smooth part).</dd>
<dd>Computed in single precision, the answer z is near the exact z* for the same input: ‖z − z*‖ ≤
{small(bound)}.</dd>"""
    return section(
        "proof",
        "2 · why there is no other answer",
        "One answer, and a proof",
        f"""{words}<p>The same argument says how good the computed answer is. A computer stops after
finitely many steps and rounds every number. All of that counted, the answers to the
{len(bounds)} problems are at most {" and ".join(small(b) for b in bounds)} away from the exact
ones.</p>
<details><summary>The same in symbols</summary><dl>{rows}
<dt>Where this comes from</dt><dd>Each problem is to minimize G(z; x) = f(z) + ½‖z‖² + q(z; x)
over z; f keeps z nonnegative, and q is a Gaussian kernel between the state and the picture. A
step is
z ← T(z) with max(|1 − m|, |L − 1|) = ρ &lt; 1. In Python: <code>eq.certify(layer, x)</code>.</dd>
</dl></details><p class="note">The proof says that the answer is the one that the network means. It
does not say that this answer is right. How often it is right is a matter of counting, and comes
next.</p>""",
    )


def confidence(n: dict[str, Any]) -> str:
    digit, found = n["digit"], n["confidence"]
    chances = bars(
        ((str(k), p) for k, p in enumerate(digit["probabilities"])),
        f"Probability of each of the ten digits; {digit['label']} has "
        f"{percent(digit['probabilities'][digit['label']], 2)}",
    )
    rows = ""
    for group in found["groups"]:
        low, high = round(100 * group["from"]), round(100 * group["to"])
        name = f"{low}–{high}%" if low else f"below {high}%"
        name = f"{low}% or more" if high == 100 else name
        share = percent(group["right"] / group["count"]) if group["count"] else "–"
        rows += (
            f"<tr><th>{name}</th><td>{group['count']}</td><td>{group['right']}</td>"
            f"<td>{share}</td></tr>"
        )
    doubt = [
        picture(d["picture"], f"A handwritten {d['truth']}, read as {d['label']}")
        + f"{d['label']}, {percent(d['confidence'])}"
        + ("" if d["label"] == d["truth"] else f'<br><span class="bad">is a {d["truth"]}</span>')
        for d in found["doubtful"]
    ]
    return section(
        "confidence",
        "3 · how sure it is",
        f"“It is a {digit['label']}”, in percent",
        f"""<div class="card">{chances}</div>
<p>Such a percentage is worth something only if it is true on average. So count: how often is the
network right when it says that it is that sure?</p>
<div class="card"><table><thead><tr><th>it says</th><th>digits</th><th>right</th><th>share</th></tr>
</thead><tbody>{rows}</tbody></table></div>
<p>These are the {len(doubt)} test digits that it is least sure of. An honest doubt is useful: a
program can pass such cases on to a person.</p>{tiles(doubt)}""",
    )


def radius(n: dict[str, Any]) -> str:
    found, digit = n["radius"], n["digit"]
    own = found["radius"]
    shots = [
        picture(digit["picture"], "The picture as it is")
        + f"the picture: <strong>{found['label']}</strong>",
        picture(found["edge"]["picture"], "The picture at the edge of what is proven")
        + f"changed by {found['edge']['distance']:.2f}: still "
        f"<strong>{found['edge']['label']}</strong>",
    ]
    broken = found["broken"]
    between = "No change in that direction that was tried gave another label."
    if broken is not None:
        shots.append(
            picture(broken["picture"], f"The picture changed until it is read as {broken['label']}")
            + f"changed by {broken['distance']:.2f}: <strong>{broken['label']}</strong>"
        )
        between = (
            f"The same change, made larger, gives another label ({broken['label']}) at "
            f"{broken['distance']:.2f}. Between the two numbers nothing is proven."
        )
    promise = (
        f"""No picture within <strong>{own:.3f}</strong> of this one gets another label. That is one
pixel changed by {percent(own, 0)} of the way from white to black, or all 64 pixels by
{percent(own / 8)} each, or anything between."""
        if own > 0
        else f"Nothing is proven for this picture (radius {own:.3f})."
    )
    truth = "" if found["label"] == digit["truth"] else f" (wrong: it is a {digit['truth']})"
    curve = [(p["radius"], p["accuracy"]) for p in found["curve"]]
    attacks = [(p["radius"], p["accuracy"]) for p in found["attacks"]]
    return section(
        "radius",
        "4 · how far the picture may change",
        "How large must a change be to flip the label?",
        f"""<p>Many networks change their mind when a few pixels change by amounts that nobody
sees. A
<strong>certified radius</strong> excludes this. It is a distance: as long as the picture changes by
less, the label is proven to stay, whatever the change is. Distance here is the root of the sum of
the squared changes of all 64 pixels, each from 0 (white) to 1 (black).</p>
<p>For large radii a network must be made for it. So a second, smaller equilibrium network was
trained (a monotone one, {found["parameters"]:,} parameters, a little less accurate:
{percent(found["accuracy"])}). It reads the picture as
<strong>{found["label"]}</strong>{truth}.</p>
<div class="short"><p>{promise}</p></div>
<div class="card">{tiles(shots)}<p class="note">The change is the one that this network minds most,
towards a {found["nearest"]}. {between} Of {found["random_tried"]:,} random changes of size
{own:.3f}, {found["random_changed"] or "none"} changed the label.</p></div>"""
        + figure(
            chart(
                [
                    Line("right, and proven to stay right", "a", curve),
                    Line("right under attack (measured)", "b", attacks, dots=True),
                ],
                alt="Share of test digits that are right and proven, over the size of the change; "
                "the attacked accuracy lies above it",
                xlabel="size of the change",
                ylabel="share of the test digits",
                share=True,
                top=1.0,
            ),
            f"All {n['test_digits']} test digits. Half of them have a radius above "
            f"{found['median']:.2f}. An attack searches for a change that flips the label; by the "
            "proof it cannot get below the line.",
        )
        + f"""<p class="note">The first network, which was not made for this, has a proven radius of
only {small(found["geq_radius"])} for the same picture. That need not be fragile; it is only what
can be
proven.</p>""",
    )


def noise(n: dict[str, Any]) -> str:
    levels, truth = n["noise"], n["digit"]["truth"]
    shots = [
        picture(level["picture"], f"The digit with noise {level['sigma']:g}")
        + f"noise {level['sigma']:g}<br><strong"
        + ("" if level["label"] == truth else ' class="bad"')
        + f">{level['label']}</strong>, {percent(level['confidence'])}"
        for level in levels
    ]
    last = levels[-1]
    gap = last["mean_confidence"] - last["accuracy"]
    verdict = (
        "It says so: on average it claims about what it delivers."
        if abs(gap) < 0.05
        else f"But it is too sure of itself: it claims {percent(last['mean_confidence'])} on "
        "average. It has seen clean digits only."
        if gap > 0
        else f"It is more careful than it must be: it claims {percent(last['mean_confidence'])} on "
        "average."
    )
    certified = (
        "The answer stays provably unique at every level: noise can make it wrong, not ambiguous."
        if all(level["unique"] for level in levels)
        else "At some levels uniqueness is not proven."
    )
    return section(
        "noise",
        "5 · what noise does",
        "Less to see, fewer right answers",
        f"""<p>Back to the first network. Random noise is added to every pixel (the number is its
standard deviation, where 1 is the way from white to black).</p>
<div class="card">{tiles(shots)}</div>"""
        + figure(
            chart(
                [
                    Line("right", "a", [(v["sigma"], v["accuracy"]) for v in levels]),
                    Line(
                        "claimed: mean confidence",
                        "b",
                        [(v["sigma"], v["mean_confidence"]) for v in levels],
                        dash=True,
                    ),
                ],
                alt="Accuracy and mean confidence over the noise, all test digits: accuracy falls "
                f"from {percent(levels[0]['accuracy'])} to {percent(last['accuracy'])}",
                xlabel="noise",
                ylabel="share of the test digits",
                share=True,
                top=1.0,
            ),
            f"All {n['test_digits']} test digits with noise.",
        )
        + f"""<p>With noise {last["sigma"]:g}, {percent(last["accuracy"])} of the answers are still
right. {verdict}</p><p class="note">{certified}</p>""",
    )


def letters(n: dict[str, Any]) -> str:
    found = n["letters"]
    shots = [
        picture(v["picture"], f"The letter {v['letter']}")
        + f"{v['letter']} → {v['label']}<br>{percent(v['confidence'])}"
        for v in found["letters"]
    ]
    count = len(shots)
    told = (
        "So low confidence is a hint that something is not a digit, but no more than a hint: some "
        "letters pass for digits."
        if found["sure"]
        else "So here low confidence gives every letter away."
    )
    certified = (
        "The certificate holds for the letters, too: one answer each. Proven is what was computed, "
        "not that the question made sense."
        if found["unique"]
        else ""
    )
    return section(
        "letters",
        "6 · a letter that is no digit",
        "It has no word for “neither”",
        f"""<p>The network knows ten answers and must give one of them. What does it say of a
letter?</p>
<div class="card">{tiles(shots)}</div>
<p>On average it is {percent(found["mean_confidence"])} sure of a letter and
{percent(found["digits_mean_confidence"])} of a handwritten digit. More than 90% sure it is of
{found["sure"]} of {count} letters and of {percent(found["digits_sure"])} of the digits. {told}</p>
<p class="note">The letters are printed ones, made in the same way as the digits of the data set.
As a
control, digits of the same font: {found["font_digits_right"]} of 10 are read correctly.
{certified}</p>""",
    )


def twins(n: dict[str, Any]) -> str:
    networks = n["networks"]

    def cells(text: Any) -> str:
        return "".join(f"<td>{text(network)}</td>" for network in networks.values())

    def row(name: str, about: str, text: Any) -> str:
        return f"<tr><th>{name}<small>{about}</small></th>{cells(text)}</tr>"

    def given(key: str, text: Any) -> Any:
        return lambda v: "–" if v[key] in (None, []) else text(v[key])

    head = "".join(f"<th>{html.escape(name)}</th>" for name in networks)
    rows = [
        row("parameters", "numbers that were learned", lambda v: f"{v['parameters']:,}"),
        row(
            "accuracy",
            f"right answers on {n['test_digits']} test digits",
            lambda v: f"{100 * v['metrics']['accuracy']:.2f}%",
        ),
        row(
            "ECE",
            "expected calibration error: by how much the stated confidence misses the share of "
            "right answers; 0 is best",
            lambda v: f"{v['metrics']['ece']:.3f}",
        ),
        row(
            "NLL",
            "negative log-likelihood: a penalty for each wrong or unsure answer; 0 is best",
            lambda v: f"{v['metrics']['nll']:.3f}",
        ),
        row(
            "solver steps",
            "per layer, on average over the digits",
            given("steps", lambda s: ", ".join(f"{k:.1f}" for k in s)),
        ),
        row("solved", "share of solves that reached their tolerance", given("converged", percent)),
        row("one answer, proven", "for 64 digits", given("unique", lambda u: "yes" if u else "no")),
        row(
            "error at most",
            "distance to the exact answer, worst of 64 digits",
            given("error_bound", small),
        ),
        row("training time", "on this machine, in this run", lambda v: f"{v['seconds']:.0f} s"),
    ]
    losses = [
        Line(name, color, [(h["epoch"], h["train_loss"]) for h in network["history"]], dash=dash)
        for (name, network), color, dash in zip(
            networks.items(), "abc", (False, False, True), strict=True
        )
    ]
    accuracy = [v["metrics"]["accuracy"] for v in networks.values()]
    spread = (max(accuracy) - min(accuracy)) * n["test_digits"]
    fastest = min(networks, key=lambda name: networks[name]["seconds"])
    quick = networks["explicit"]["seconds"]
    cost = (
        f"The ordinary network trains {networks['GEQ']['seconds'] / quick:.0f} times faster. If "
        "accuracy on digits is all that you need, take it."
        if fastest == "explicit"
        else ""
    )
    return section(
        "twins",
        "7 · beside its twins",
        "What it costs, and what it brings",
        f"""<p>Three networks of the same size, trained in the same way for {n["epochs"]} passes
over the
same digits:</p><dl><dt>GEQ</dt><dd>The network of this page: Gaussian-kernel equilibrium
(Li et al. 2023). The state and the picture are compared by a Gaussian kernel.</dd>
<dt>OptEq</dt><dd>Its linear twin: optimization-induced equilibrium (Xie et al. 2021). The same,
with a
linear comparison in place of the Gaussian one.</dd>
<dt>explicit</dt><dd>The explicit twin: an ordinary network, with two convolutions in the place of
each
equilibrium layer. It solves nothing.</dd></dl>
<div
class="card"><table><thead><tr><th></th>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table>
</div>"""
        + figure(
            chart(
                losses,
                alt="Training loss of the three networks over the epochs",
                xlabel="pass over the digits",
                ylabel="training loss",
            ),
            "How training went: the loss of each network.",
        )
        + f"""<p>The best and the worst of them differ by {round(spread)} of {n["test_digits"]}
digits. {cost} What the equilibrium networks bring is the rest of this page: a problem that can be
written down, one answer to it, and a bound on how far the computed answer is from it.</p>""",
    )


def page(numbers: dict[str, Any]) -> str:
    n, versions = numbers, numbers["versions"]
    body = "".join(
        part(n) for part in (opening, solve, proof, confidence, radius, noise, letters, twins)
    )
    footer = f"""Made by <code>make demo</code> in {n["seconds"]:.0f} seconds: equilibria
{versions["equilibria"]}, torch {versions["torch"]}, Python {versions["python"]}, seed {n["seed"]},
test digit {n["digit"]["index"]}. Every number on this page is in report.json beside it."""
    return shell("equilibria: the story of one digit", body, footer)
