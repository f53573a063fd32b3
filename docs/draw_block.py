"""Print docs/block.svg, the picture of the block.

    python docs/draw_block.py > docs/block.svg

Boxes have their own light background, and lines are gray, so the picture is readable on a
white and on a black page.
"""

from collections.abc import Iterator

WIDTH, HEIGHT = 840, 130
STREAM = 92  # the height of the residual stream
BRANCH = 26  # the height of the norms and of what follows them


def line(*points: tuple[int, int], end: str = "") -> str:
    path = " L ".join(f"{x} {y}" for x, y in points)
    return f'<path d="M {path}" fill="none" stroke="#888" stroke-width="2" {end}/>'


def arrow(*points: tuple[int, int]) -> str:
    return line(*points, end='marker-end="url(#head)"')


def text(x: int, y: int, words: str, color: str = "#222") -> str:
    return f'<text x="{x}" y="{y + 5}" fill="{color}">{words}</text>'


def box(x: int, width: int, words: str, color: str) -> Iterator[str]:
    yield (
        f'<rect x="{x}" y="{BRANCH - 18}" width="{width}" height="36" rx="6" '
        f'fill="{color}" stroke="#888"/>'
    )
    yield text(x + width // 2, BRANCH, words)


def plus(x: int) -> Iterator[str]:
    yield f'<circle cx="{x}" cy="{STREAM}" r="13" fill="#fff" stroke="#888"/>'
    yield text(x, STREAM, "+")


def branch(start: int, norm: str, layer: str, color: str) -> Iterator[str]:
    """Draw a norm and a layer above the stream, and the sum of their result and x."""
    yield arrow((start, STREAM), (start, BRANCH), (start + 38, BRANCH))
    yield from box(start + 40, 80, norm, "#e8e8e8")
    yield arrow((start + 120, BRANCH), (start + 143, BRANCH))
    yield from box(start + 145, 120, layer, color)
    yield arrow(
        (start + 265, BRANCH), (start + 300, BRANCH), (start + 300, STREAM - 15)
    )
    yield from plus(start + 300)


def picture() -> Iterator[str]:
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" font-size="15" '
        'text-anchor="middle">'
    )
    yield "<title>y = x + attn(ln1(x)), and the result is y + ffn(ln2(y))</title>"
    yield (
        '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" '
        'markerHeight="6" orient="auto"><path d="M 0 0 L 8 4 L 0 8 z" fill="#888"/>'
        "</marker>"
    )
    yield text(15, STREAM, "x", "#888")
    yield arrow((30, STREAM), (365, STREAM))
    yield from branch(80, "ln1", "attention", "#cfe3f7")
    yield text(428, STREAM + 22, "y", "#888")
    yield arrow((393, STREAM), (765, STREAM))
    yield from branch(480, "ln2", "ffn", "#f9ddc4")
    yield arrow((793, STREAM), (836, STREAM))
    yield "</svg>"


if __name__ == "__main__":
    print("\n".join(picture()))
