"""The bit explorer: states, the payload as plain values, the widget, and the static HTML."""

import bisect
import json
import math
import random
import re
from fractions import Fraction
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from amplab.display.numbers import parse_exact, parse_number, value_text
from amplab.display.palette import PALETTE
from amplab.formats import FORMATS
from amplab.views import BitExplorer
from amplab.views.assets import module, stylesheet
from amplab.views.bit_explorer import MOST_STEPS, explorer_html
from amplab.views.bit_explorer_payload import BitState, explorer_payload

any_format = st.sampled_from(list(FORMATS))


@st.composite
def any_state(draw):
    """Any pattern of any format, with or without something typed."""
    state = BitState(draw(any_format))
    state = BitState(state.format_name, draw(st.integers(0, 2**state.fmt.total_bits - 1)))
    return state.with_number(draw(st.floats().map(repr))) if draw(st.booleans()) else state


def shown(text, format_name="float16"):
    return explorer_payload(BitState(format_name).with_number(text))


# ---- states -------------------------------------------------------------------------------------


def test_flipping_is_undone_by_flipping_again():
    state = BitState("bfloat16").with_number("0.1")
    for position in range(16):
        flipped = state.with_flipped(position)
        assert flipped.bits ^ state.bits == 1 << position
        assert flipped.typed == ""
        assert flipped.with_flipped(position).bits == state.bits


def test_the_number_is_kept_when_the_format_changes():
    state = BitState("float16").with_number("0.1").with_format("float8_e5m2").with_format("float32")
    assert (state.typed, state.value) == ("0.1", np.float32(0.1))


def test_a_flipped_pattern_goes_to_the_next_format_as_a_number():
    state = BitState("float32").with_number("1").with_flipped(0).with_format("float16")
    assert (state.typed, state.value) == ("8388609 × 2^-23", 1.0)


def test_stepping_visits_the_neighbors_and_stops_at_the_ends():
    half = BitState("float16").with_number("65504")
    assert half.with_step(1).value == half.with_step(5).value == math.inf
    assert half.with_step(-2).value == 65504 - 64
    assert BitState("float8_e4m3").with_number("448").with_step(1).value == 448
    assert BitState("float16").with_step(-1).value == -(2.0**-24)
    nan = BitState("float16").with_number("nan")
    assert nan.with_step(1).bits == nan.bits


def test_hex_and_binary_are_patterns():
    assert BitState("float16").with_number("0x3c00").value == 1.0
    assert BitState("float8_e5m2").with_number("0b10111100").value == -1.0
    assert BitState("float16").with_number("0x3c00").typed == ""


@pytest.mark.parametrize(
    ("text", "problem"),
    [("abc", "'abc' is not a number"), ("0xzz", "'0xzz' is not a pattern"), ("0x10000", "from 0x0 to 0xffff")],
)
def test_what_cannot_be_read_changes_no_bits_and_is_explained(text, problem):
    before = BitState("float16").with_number("1")
    after = before.with_number(text)
    assert (after.bits, after.number) == (before.bits, 1.0)
    assert problem in after.problem
    assert explorer_payload(after)["rounding"] == {"verdict": "unread", "text": after.problem}


def test_a_state_without_such_a_format_or_bit_is_refused():
    with pytest.raises(ValueError, match="format_name='half'"):
        BitState("half")
    with pytest.raises(ValueError, match="position=16"):
        BitState("float16").with_flipped(16)


# ---- the payload --------------------------------------------------------------------------------


@given(any_state())
def test_a_payload_is_json_and_its_bits_are_the_pattern(state):
    payload = json.loads(json.dumps(explorer_payload(state), allow_nan=False))
    digits = "".join("01"[bit["on"]] for bit in payload["bits"])
    assert int(digits, 2) == int(payload["hex"], 16) == state.bits
    np.testing.assert_array_equal(parse_number(payload["value"]), state.value)


@given(any_state())
def test_the_formula_computes_the_value(state):
    formula = explorer_payload(state)["formula"]
    if formula is None:
        assert not math.isfinite(state.value)
        return
    whole, _, fraction = formula["significand"].partition(".")
    significand = int(whole + fraction, 2) / 2 ** len(fraction)
    exponent, bias = (int(part) for part in formula["exponent"].split(" − "))
    assert (-1) ** int(formula["sign"]) * 2.0 ** (exponent - bias) * significand == state.value
    assert parse_number(formula["decimal"]) == significand
    assert int(formula["power"].replace("−", "-")) == exponent - bias


@given(any_state())
def test_every_position_lies_on_its_line(state):
    payload = explorer_payload(state)
    ruler = payload["ruler"]
    places = [ruler["marker"]] + [row[end] for row in ruler["rows"] for end in ("start", "normal", "end")]
    if payload["neighbors"]:
        places += [*payload["neighbors"]["zone"], payload["neighbors"]["typed"]]
        places += [payload["neighbors"][name]["position"] for name in ("below", "above")]
    assert all(0 <= place <= 100 for place in places if place is not None)


@given(any_format, st.floats(-1e6, 1e6))
def test_a_typed_number_lies_in_the_zone_of_the_value_it_rounds_to(format_name, number):
    neighbors = shown(repr(number), format_name)["neighbors"]
    if neighbors and neighbors["typed"] is not None:
        low, high = neighbors["zone"]
        assert low - 1e-6 <= neighbors["typed"] <= high + 1e-6


def test_neighbors_of_a_power_of_two_are_nearer_below():
    neighbors = shown("1")["neighbors"]
    assert neighbors["below"]["text"] == "0.99951171875"
    assert neighbors["above"]["text"] == "1.0009765625"
    assert 50 - neighbors["below"]["position"] == (neighbors["above"]["position"] - 50) / 2
    assert neighbors["gap_above"] == "2⁻¹⁰ = 0.000977"
    half_way = [(50 + neighbors[name]["position"]) / 2 for name in ("below", "above")]
    assert neighbors["zone"] == half_way


def test_a_tie_below_a_power_of_two_is_halfway_to_the_nearer_neighbor():
    rounding = shown("2047.5")["rounding"]
    assert rounding["verdict"] == "tie"
    assert "0.40 of the spacing" in shown("2047.6")["rounding"]["text"]


def test_neighbors_at_the_edge_of_the_range():
    assert shown("65504")["neighbors"]["above"]["text"] == "∞"
    finite_only = shown("448", "float8_e4m3")["neighbors"]
    assert (finite_only["above"]["text"], finite_only["zone"][1]) == ("no number", 100.0)
    assert shown("inf")["neighbors"] is shown("nan")["neighbors"] is None


@pytest.mark.parametrize(
    ("text", "format_name", "verdict", "said"),
    [
        ("1", "float16", "exact", "exactly"),
        ("2049", "float16", "tie", "last bit is 0, off by -1 (0.049 % of the number)"),
        ("0.1", "float16", "rounded", "off by -2.44e-5 (0.024 % of the number), 0.40 of the spacing"),
        ("1e-8", "float16", "underflow", "half of the smallest number, 2⁻²⁴"),
        ("65519", "float16", "rounded", "off by -15"),
        ("65520", "float16", "overflow", "from 65520"),
        ("-1e9", "float16", "overflow", "rounds to infinity"),
        ("465", "float8_e4m3", "clipped", "above 464"),
        ("464", "float8_e4m3", "tie", "off by -16"),
        ("nan", "float16", "exact", "exactly"),
        ("1e400", "float32", "overflow", "rounds to infinity"),
        ("1e400", "float8_e4m3", "clipped", "above 464"),
        ("-1e-400", "float32", "underflow", "2⁻¹⁴⁹"),
        ("2^-1100", "float16", "underflow", "2⁻²⁴"),
        ("1 + 2^-60", "float32", "rounded", "off by -8.67e-19"),
        ("1 + 1e-400", "float16", "rounded", "off by -1e-400 (1e-400 of the number), 0.00 of the spacing"),
        ("1.00000000000000000001", "float32", "rounded", "off by -1e-20"),
        ("2049.0000000000000001", "float16", "rounded", "off by 1 "),
        ("2^-150", "float32", "underflow", "at most half"),
        ("2^-150 + 2^-900", "float32", "rounded", "off by 7.01e-46"),
        ("2^128 - 2^103", "float32", "overflow", "from 2¹²⁸ − 2¹⁰³ up"),
        ("2^128 - 2^103 - 1", "float32", "rounded", "off by -1.01e31"),
        ("4^0.5", "float16", "exact", "Computed in float64: 2. Represented exactly."),
    ],
)
def test_what_became_of_a_number_is_told(text, format_name, verdict, said):
    rounding = shown(text, format_name)["rounding"]
    assert rounding["verdict"] == verdict
    assert said in rounding["text"]


def rounded_by_search(number, patterns):
    """The pattern whose value is nearest to a fraction, of two the even one, and what became of the number.

    `patterns` are those of the format from 0 up with their values; the last one is infinity, with the number that
    would be there.
    """
    values = [value for _, value in patterns]
    place = bisect.bisect_right(values, abs(number)) - 1
    pattern, low = patterns[place]
    if place == len(patterns) - 1:
        return pattern, "overflow"
    if abs(number) == low:
        return pattern, "exact"
    above, high = patterns[place + 1]
    to_low, to_high = abs(number) - low, high - abs(number)
    nearest, value = (pattern, low) if (to_low, pattern % 2) < (to_high, above % 2) else (above, high)
    if value == 0 or nearest == patterns[-1][0]:
        return nearest, "underflow" if value == 0 else "overflow"
    return nearest, "tie" if to_low == to_high else "rounded"


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float8_e5m2"])
def test_a_number_that_float64_does_not_hold_is_rounded_once(name):
    fmt = FORMATS[name]
    top = fmt.bits(fmt.max)
    patterns = [(bits, Fraction(fmt.value(bits))) for bits in range(top + 1)]
    patterns.append((top + 1, 2 * patterns[-1][1] - patterns[-2][1]))  # infinity, where the next number would be
    chance = random.Random(0)
    for _ in range(150):
        place = chance.choice([0, 1, 2, top - 1, top, chance.randrange(top)])
        (_, low), (_, high) = patterns[place : place + 2]
        near = chance.choice([low, (low + high) / 2, high]) or high
        beside = chance.choice(["", " + 2^-2000", " - 1e-1000", " + 1e-300", " - 3^-400"])
        last = (near.numerator & -near.numerator).bit_length() - near.denominator.bit_length()
        text = f"{chance.choice(['', '-'])}({near / Fraction(2) ** last} × 2^{last}{beside})"
        number = parse_exact(text)
        pattern, verdict = rounded_by_search(Fraction(number), patterns)
        state = BitState(name).with_number(text)
        sign = math.copysign(1.0, float(number)) < 0
        assert state.bits == pattern + (sign << (fmt.total_bits - 1)), text
        assert explorer_payload(state)["rounding"]["verdict"] == verdict, text


def test_beyond_what_can_be_read_exactly_is_refused_at_once():
    for text in ("1e999999999", "1e-999999999", "2^1000000000", "2^-1000000000", "9^9^9", "1.5e" + "9" * 50):
        assert "too large or too close to 0" in BitState().with_number(text).problem


@given(any_format, st.floats())
def test_a_float_is_shown_as_text_that_rounds_as_the_float_in_every_format(format_name, value):
    state = BitState(format_name).with_value(value)
    assert state.bits == state.fmt.bits(value)
    is_held = math.isnan(value) or state.value == value
    assert (explorer_payload(state)["rounding"]["verdict"] == "exact") == is_held


@given(any_state())
def test_the_value_of_a_pattern_goes_to_its_own_format_unrounded(state):
    again = BitState(state.format_name).with_value(state.value)
    np.testing.assert_array_equal(again.value, state.value)
    assert explorer_payload(again)["rounding"]["verdict"] == "exact"


@pytest.mark.parametrize("name", FORMATS)
def test_a_number_to_try_is_what_its_label_says(name):
    marks = {mark["label"]: mark["text"] for mark in shown("1", name)["landmarks"]}
    for label in ("largest", "smallest normal", "smallest", "1 + ε"):
        assert shown(marks[label], name)["rounding"]["verdict"] == "exact"


def test_the_ruler_says_what_each_format_makes_of_the_number():
    rows = {row["name"]: row for row in shown("1e-8")["ruler"]["rows"]}
    for name, fmt in FORMATS.items():
        if fmt.torch_dtype is not None:
            cast = torch.tensor(1e-8).to(fmt.torch_dtype).float().item()
            assert parse_number(rows[name]["result"]) == pytest.approx(cast, rel=1e-8)
    assert rows["float16"]["words"] == "underflows"
    assert rows["bfloat16"]["words"] == "off by 0.12 %"
    assert rows["float16"]["start"] < rows["float16"]["normal"] < rows["float16"]["end"]


def test_the_mark_on_the_ruler_moves_with_the_logarithm():
    at = {text: shown(text)["ruler"]["marker"] for text in ("0", "2^-24", "1", "2^24", "inf", "nan")}
    assert at["1"] - at["2^-24"] == pytest.approx(at["2^24"] - at["1"], abs=0.01)
    assert (at["0"], at["inf"], at["nan"]) == (0.0, 100.0, None)
    assert shown("-1")["ruler"]["marker"] == at["1"]


@pytest.mark.parametrize("name", FORMATS)
def test_landmarks_are_what_they_say(name):
    fmt = FORMATS[name]
    numbers = {mark["label"]: parse_number(mark["text"]) for mark in shown("1", name)["landmarks"]}
    assert numbers["largest"] == fmt.max
    assert numbers["smallest normal"] == fmt.smallest_normal
    assert numbers["smallest"] == fmt.smallest_subnormal
    assert numbers["1 + ε"] == fmt.next_up(1.0)


def test_kinds_are_explained():
    assert "A subnormal number" in shown("2^-24")["note"]
    assert "power stays at −14" in shown("2^-24")["note"]
    assert "no infinity" in shown("nan", "float8_e4m3")["note"]
    assert "the fraction is not 0" in shown("nan")["note"]
    assert "overflows" in shown("inf")["note"]


# ---- the still picture --------------------------------------------------------------------------


class TextOf(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.text = [], ""

    def handle_starttag(self, tag, _attributes):
        self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


@given(any_state())
def test_the_still_picture_is_sound_html_with_the_bits_and_the_value(state):
    payload = explorer_payload(state)
    reader = TextOf()
    reader.feed(explorer_html(payload))
    assert reader.open == []
    assert reader.text.startswith(f"{state.bits:0{state.fmt.total_bits}b}")
    assert payload["value"] in reader.text


def test_the_still_picture_escapes_what_was_typed():
    assert "<script>" not in explorer_html(shown("<script>"))


# ---- the widget ---------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [2.0**-24, np.float32(0.1), 2**60, -(2.0**-149), 1 + 2.0**-23, True, 0, -0.0])
def test_a_number_of_python_that_the_format_has_is_exact(number):
    explorer = BitExplorer(number, "float32")
    assert explorer.value == number
    assert explorer.payload["rounding"]["verdict"] == "exact"


@pytest.mark.parametrize(
    ("number", "verdict"), [(2**60 + 1, "rounded"), (0.1, "rounded"), (1 + 2.0**-24, "tie"), (2**300, "overflow")]
)
def test_a_number_of_python_that_the_format_has_not_is_rounded_as_it_is(number, verdict):
    assert BitExplorer(number, "float32").payload["rounding"]["verdict"] == verdict


def test_methods_do_what_clicks_do():
    explorer = BitExplorer("0.1")
    explorer.pick("float8_e4m3")
    assert explorer.value == 0.1015625
    explorer.flip(0)
    assert (explorer.bits, explorer.value) == (0x1C, 0.09375)
    explorer.step()
    assert explorer.value == 0.1015625
    explorer.enter(1000)
    assert (explorer.format_name, explorer.value) == ("float8_e4m3", 448.0)
    assert explorer.payload == explorer_payload(BitState("float8_e4m3", 0x7E, "1000"))


@pytest.mark.parametrize(
    ("message", "value"),
    [({"flip": 15}, -1.0), ({"step": -1}, 0.99951171875), ({"pick": "float32"}, 1.0), ({"enter": "2^-24"}, 2.0**-24)],
)
def test_messages_of_the_page_change_the_payload(message, value):
    explorer = BitExplorer(1)
    published = []
    explorer.observe(lambda change: published.append(change["new"]["value"]), "payload")
    explorer._handle_custom_msg(message, [])
    assert explorer.value == value
    assert published == [value_text(value)]


def test_a_half_typed_number_from_the_page_is_shown_with_its_reason():
    explorer = BitExplorer(1)
    explorer._handle_custom_msg({"enter": "1e-"}, [])
    assert explorer.value == 1.0
    assert explorer.payload["rounding"]["verdict"] == "unread"


def test_a_number_that_cannot_be_read_is_refused_in_python():
    explorer = BitExplorer(1)
    with pytest.raises(ValueError, match="'many'"):
        explorer.enter("many")
    assert explorer.value == 1.0
    with pytest.raises(ValueError, match="format_name='fp16'"):
        BitExplorer(1, "fp16")


def test_the_payload_cannot_be_set_from_outside():
    with pytest.raises(Exception, match="read-only"):
        BitExplorer(1).payload = {}


def test_the_repr_is_one_line_with_the_numbers():
    assert repr(BitExplorer("1/3")) == "BitExplorer('1/3', 'float16'): 0x3555 = 0.333251953125, spacing 2⁻¹²"
    assert repr(BitExplorer("0x7c00")) == "BitExplorer('∞', 'float16'): 0x7c00 = ∞"
    assert repr(BitExplorer(0.5)) == repr(BitExplorer("0.5"))


def test_the_bundle_has_the_widget_the_line_and_the_still_picture():
    explorer = BitExplorer("1/3")
    data, _ = explorer._repr_mimebundle_()
    assert data["text/plain"] == repr(explorer)
    assert data["text/html"] == explorer_html(explorer.payload)
    assert data["application/vnd.jupyter.widget-view+json"]["model_id"] == explorer.model_id


# ---- its page -----------------------------------------------------------------------------------

SCRIPT = module("bit_explorer.js")
STYLE = stylesheet("bit_explorer.css")


def test_the_page_sends_only_messages_that_are_answered():
    assert set(re.findall(r"act\(\{ (\w+):", SCRIPT)) == {"pick", "flip", "step", "enter"}


def luminance(color):
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one, other):
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize(("theme", "background"), [(0, "#ffffff"), (1, "#212121")])
def test_every_hue_can_be_read_on_the_themes_background(theme, background):
    hues = [PALETTE[name][theme] for name in ("sign", "exponent", "fraction", "warning")]
    assert all(contrast(hue, background) >= 4.5 for hue in hues)


def test_a_number_of_steps_that_would_take_long_is_refused():
    explorer = BitExplorer("1", "float32")
    for steps in (10**15, -(10**400), MOST_STEPS + 1):
        explorer._handle_custom_msg({"step": steps}, [])
        assert explorer.value == 1.0
        with pytest.raises(ValueError, match="expected at most 4096 steps up or down"):
            explorer.step(steps)
    explorer._handle_custom_msg({"step": MOST_STEPS}, [])
    assert explorer.value == 1.0 + MOST_STEPS * 2.0**-23
