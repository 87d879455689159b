"""The HTML report of a mismatch: both sides against each other, ratios, differences by position, and the tail."""

from __future__ import annotations

from typing import Any

import torch

from nemo_fp8.mismatch import LogProbs, kind_of
from nemo_fp8.report.figures import color, drawing, legend
from nemo_fp8.report.mismatch import MEANING, Mismatch, by_position, quantiles, sample, tail, worst
from nemo_fp8.report.page import Cell, Column, Page

# The styles of observed and predicted values. No recipe is drawn on this page, so two recipes' colours are free.
OBSERVED: dict[str, Any] = {"color": color("tensorwise"), "label": "observed"}
PREDICTED: dict[str, Any] = {"color": color("blockwise"), "label": "predicted", "linestyle": "--"}
BROKEN, CALM = color("tensorwise"), color("mxfp8")
SIDES = {"below": "below it", "inside": "inside", "above": "above it"}


def mismatch_page(mismatch: Mismatch) -> Page:
    """Return the page of a mismatch; ``mismatch_page(m).write("report.html")`` writes it."""
    pair = mismatch.pair
    page = Page("Trainer against rollout", f"{mismatch.source}: {pair.tokens:,} tokens in {pair.sequences:,} sequences")
    _overview(page, mismatch)
    _gate(page, mismatch)
    predicted = None if mismatch.prediction is None else mismatch.prediction.pair
    _scatter(page, pair)
    _ratios(page, pair, predicted)
    _positions(page, pair, predicted)
    _tail(page, mismatch, predicted)
    return page


def _overview(page: Page, mismatch: Mismatch) -> None:
    expected, limits = mismatch.expected, dict(mismatch.limits)
    columns: list[str | Column] = ["metric", Column("observed", ".6g")]
    columns += [Column("predicted", ".6g", "by emulation of the rollout")] if expected else []
    columns += [Column("limit", ".6g")] if limits else []
    rows = []
    for name, value in mismatch.metrics.items():
        row = [
            name,
            value,
            *([expected[name]] if expected else []),
            *([limits.get(name)] if limits else []),
            MEANING[name],
        ]
        rows.append(row)
    page.section("Metrics").table(
        [*columns, ""], rows, "t and g are the trainer's and the rollout's log-prob of a sampled token."
    )
    if mismatch.pair.dropped:
        page.text(f"{mismatch.pair.dropped:,} tokens with a log-prob of -inf are left out.")
    for name, value, limit in mismatch.over:
        page.text(f"{name} is {value:.6g}, above its limit of {limit:.6g}.")


def _gate(page: Page, mismatch: Mismatch) -> None:
    verdict = mismatch.verdict
    page.section("Gate")
    if verdict is None:
        page.text(
            "No band was predicted: give --model and --precision, and tokens in the file, to tell noise from broken "
            "weights."
        )
        return
    page.text(
        "The gate fires: this is more than the noise of the contract."
        if verdict.fired
        else "The gate is calm: this is the contract's noise."
    )
    numbers = [Column(title, ".4g") for title in ("observed", "expected", "lowest", "highest")]
    rows = [
        (
            c.name,
            c.observed,
            c.band.expected,
            c.band.low,
            c.band.high,
            Cell(SIDES[c.side], BROKEN if c.side == "above" else CALM if c.side == "inside" else color("bf16")),
        )
        for c in verdict.checks
    ]
    caption = (
        "Typical difference of log-probs, (mean sqrt|d|)**2. Sound weights leave the band with a chance of "
        f"{verdict.false_positives:g}."
    )
    page.table(("check", *numbers, "band"), rows, caption)
    for found in verdict.findings:
        page.heading(f"{found.severity}: {found.what}").text(f"{found.why} {found.remedy}")
    if verdict.differences:
        page.table(
            ("weight", "kind", "severity", "what"),
            [(d.where, kind_of(d), d.severity, d.why) for d in verdict.differences],
        )


def _scatter(page: Page, pair: LogProbs) -> None:
    t, g = sample(pair)
    low = float(torch.minimum(t, g).min())
    with drawing(5.2, 4.8) as (figure, axes):
        axes[0, 0].plot([low, 0], [low, 0], color=color("bf16"), linewidth=0.8)
        axes[0, 0].plot(
            g.tolist(), t.tolist(), ".", color=OBSERVED["color"], markersize=2.2, alpha=0.5, rasterized=True
        )
        axes[0, 0].set(xlabel="rollout's log-prob", ylabel="trainer's log-prob", aspect="equal")
    shown = (
        f"{len(t):,} of {pair.tokens:,} tokens, all of those furthest apart among them."
        if len(t) < pair.tokens
        else "Every token."
    )
    page.section("Trainer against rollout").figure(figure, f"{shown} On the line both agree.")


def _ratios(page: Page, pair: LogProbs, predicted: LogProbs | None) -> None:
    sides = [(pair, OBSERVED), *([(predicted, PREDICTED)] if predicted is not None else [])]
    reach = max(size for side, _ in sides for size in quantiles(side, (0.995,)).values()) or 1e-6
    edges = torch.linspace(-reach, reach, 81, dtype=torch.float64)
    with drawing(9, 3) as (figure, axes):
        for side, style in sides:
            d = side.log_ratio[side.mask].clamp(-reach, reach)
            counts = torch.histogram(d.cpu(), edges)[0] / max(1, len(d))
            axes[0, 0].stairs((100 * counts).tolist(), edges.tolist(), **style, fill=False, linewidth=1.6)
        axes[0, 0].axvline(0, color=color("bf16"), linewidth=0.8)
        axes[0, 0].set(xlabel="log(p_trainer / p_rollout)", ylabel="% of tokens")
        legend(figure, axes)
    page.section("Log-ratios").figure(
        figure, "What lies further out is in the last bin on each side. Noise is centred on 0; a bias is not."
    )


def _positions(page: Page, pair: LogProbs, predicted: LogProbs | None) -> None:
    with drawing(9, 3) as (figure, axes):
        for side, style in [(pair, OBSERVED), *([(predicted, PREDICTED)] if predicted is not None else [])]:
            at, mean, error = zip(*by_position(side), strict=True)
            axes[0, 0].plot(at, mean, **style)
            low, high = ([m + sign * e for m, e in zip(mean, error, strict=True)] for sign in (-2, 2))
            axes[0, 0].fill_between(at, low, high, color=style["color"], alpha=0.15, linewidth=0)
        axes[0, 0].set(xlabel="position in the sequence", ylabel="mean |log-ratio|", ylim=(0, None))
        legend(figure, axes)
    caption = "With two standard errors over sequences. An error that grows with the position is in what a cache holds."
    page.section("By position").figure(figure, caption)


def _tail(page: Page, mismatch: Mismatch, predicted: LogProbs | None) -> None:
    with drawing(9, 3) as (figure, axes):
        for side, style in [(mismatch.pair, OBSERVED), *([(predicted, PREDICTED)] if predicted is not None else [])]:
            sizes, shares = tail(side)
            least = 1e-3 * max(sizes)  # further left the share is 100% everywhere
            kept = [(size, 100 * share) for size, share in zip(sizes, shares, strict=True) if size > least]
            if kept:
                axes[0, 0].plot(*zip(*kept, strict=True), **style)
        axes[0, 0].set(xscale="log", yscale="log", xlabel="|log-ratio|", ylabel="% of tokens that are larger")
        legend(figure, axes)
    page.section("The tail").figure(
        figure,
        "A few tokens far out on the right come from single positions; a line that is shifted, from all of them.",
    )
    points = quantiles(mismatch.pair)
    page.table(
        [Column(f"{name} of tokens", ".4g") for name in points],
        [list(points.values())],
        "|log-ratio| up to which so many tokens lie.",
    )
    rows = [(t.sequence, t.position, t.token, t.trainer, t.rollout, t.log_ratio) for t in worst(mismatch)]
    numbers = [
        Column("sequence", "d"),
        Column("position", "d"),
        Column("token id", "d"),
        Column("trainer", ".4f"),
        Column("rollout", ".4f"),
    ]
    page.table([*numbers, Column("log-ratio", "+.4f")], rows, "The tokens that are furthest apart.")
