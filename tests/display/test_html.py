"""Pieces of a page: what is text is escaped, what is HTML is not, and there is nothing that only an eye could find."""

import pytest
from html_outline import outline

from amplab.display.html import chip, dtype_chips, figures, html_table, key, name, page, ribbon
from amplab.display.palette import PALETTE

EVIL = '<b onclick="x">&'


def test_what_a_user_calls_things_cannot_write_into_the_page():
    table = html_table([EVIL], [[EVIL]], caption=EVIL, groups=[EVIL])
    band = ribbon([(EVIL, True, 1, EVIL)], EVIL)
    parts = (table, band, figures({EVIL: EVIL}), chip(EVIL), dtype_chips(EVIL), name(EVIL),
             key([EVIL], casts=True))  # fmt: skip
    read = outline(page(EVIL, *parts))
    assert "b" not in read.counts
    assert read.text.count(EVIL) == 11
    assert {each["data-dtype"] for _, each in read.tags if "data-dtype" in each} == {EVIL, ""}


def test_a_table_has_heads_a_caption_and_a_line_for_each_group():
    lines, groups = [["a", "1"], ["b", "2"], ["c", "3"]], ["x", "x", "y"]
    table = html_table(["op", "bytes"], lines, {1}, caption="Ops", groups=groups, chosen={2})
    read = outline(table)
    assert (read.counts["tbody"], len(read.named("th", "col")), len(read.named("th", "rowgroup"))) == (2, 2, 2)
    assert [each.get("class") for each in read.named("td")] == [None, "right"] * 3
    assert [each.get("class") for each in read.named("tr")] == [None, "group", None, None, "group", "chosen"]
    (region,) = [each for each in read.named("div") if each.get("role") == "group"]
    assert (region["tabindex"], region["aria-label"]) == ("0", "Ops")


def test_dtypes_in_a_text_become_chips_and_other_words_do_not():
    read = outline(dtype_chips("float16 ×3, int64 → bfloat16; pointfloat floats"))
    assert [each["data-dtype"] for each in read.named("span") if "data-dtype" in each] == [
        "float16",
        "int64",
        "bfloat16",
    ]
    assert read.words == "float16 ×3, int64 → bfloat16; pointfloat floats"


@pytest.mark.parametrize(
    ("path", "breaks"),
    [
        ("conv1", 0),
        ("layers.0.self_attn", 2),
        ("a/b.py:7", 2),
        ("scaled_dot_product_attention", 1),
        ("weight_ih_l0", 0),
    ],
)
def test_a_name_breaks_between_its_parts_alone(path, breaks):
    read = outline(name(path))
    assert (read.text, read.counts.get("wbr", 0)) == (path, breaks)


@pytest.mark.parametrize("ground", [(255, 255, 255), (17, 17, 17)])
def test_words_in_colour_can_be_read_on_either_ground(ground):
    tones = {name: PALETTE[name][ground[0] < 128].strip("#") for name in ("error", "warning", "note", "good")}
    for tone in tones.values():
        assert contrast(tuple(bytes.fromhex(tone)), ground) >= 4.5  # WCAG 2 AA for text


def contrast(one: tuple, other: tuple) -> float:
    lighter, darker = sorted(map(luminance, (one, other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def luminance(colour: tuple) -> float:
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (v / 255 for v in colour)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
