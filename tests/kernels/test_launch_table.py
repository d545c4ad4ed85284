"""launch_table.h on the host: every element of every tensor belongs to one block, whatever the sizes."""

import ctypes
import random

import pytest

SOURCE = """
#include "launch_table.h"
using namespace amplab;

struct Stretch {
  int64_t launch, block, pointer, first, numel, place, offset;
};

// Fills `stretches` with what every block of every launch gets, in the order of launches and blocks.
extern "C" int64_t walk(int count, const int64_t* numels, const int64_t* places, uint32_t most, uint32_t units,
                        Stretch* stretches) {
  int64_t found = 0;
  int64_t launches = 0;
  TableFiller<3> filler(most, [&](const LaunchTable<3>& table, uint32_t blocks) {
    for (uint32_t block = 0; block < blocks; ++block) {
      for_each_piece(table, block, blocks, [&](const Piece& piece) {
        const char* begin = static_cast<const char*>(table.pointers[2][piece.tensor]);
        stretches[found++] = {launches, block, reinterpret_cast<int64_t>(begin), piece.first, piece.numel,
                              table.place(piece.tensor), table.memory<const char>(2, piece) - begin};
      });
    }
    ++launches;
  }, units);
  for (int i = 0; i < count; ++i) {
    const void* pointer = reinterpret_cast<const void*>(static_cast<intptr_t>(i + 1));
    filler.add({nullptr, nullptr, pointer}, numels[i], places[i]);
  }
  filler.flush();
  return found;
}

extern "C" uint32_t share_of(uint32_t units, uint32_t block, uint32_t blocks) { return share(units, block, blocks); }
extern "C" uint32_t block_with(uint32_t unit, uint32_t units, uint32_t blocks) { return block_of(unit, units, blocks); }
extern "C" int64_t parameter_bytes() {
  return std::max({sizeof(LaunchTable<1>), sizeof(LaunchTable<2>), sizeof(LaunchTable<5>)}) + kArgumentBytes;
}
"""
UNIT = 1024


class Stretch(ctypes.Structure):
    """SOURCE's."""

    _fields_ = tuple(
        (name, ctypes.c_int64) for name in ("launch", "block", "pointer", "first", "numel", "place", "offset")
    )


@pytest.fixture(scope="module")
def header(compiled):
    """The header compiled by itself."""
    return compiled(SOURCE, "-O1", "-Wall", "-Wextra", "-Werror")


def walk(header, numels, most_blocks, places=None, most_units=2**32 - 1, room=None):
    """Return the stretches of all blocks, those of each tensor in order."""
    count = len(numels)
    sizes = (ctypes.c_int64 * count)(*numels)
    where = (ctypes.c_int64 * count)(*(range(count) if places is None else places))
    stretches = (Stretch * (room or count + 64 * most_blocks))()
    header.walk.restype = ctypes.c_int64
    found = header.walk(count, sizes, where, ctypes.c_uint32(most_blocks), ctypes.c_uint32(most_units), stretches)
    return stretches[:found]


def check_cover(numels, stretches):
    reached = [0] * len(numels)
    for each in stretches:
        tensor = each.pointer - 1
        assert each.first == each.offset == reached[tensor]
        assert each.first % UNIT == 0
        assert each.numel > 0
        reached[tensor] += each.numel
    assert reached == list(numels)


@pytest.mark.parametrize("seed", range(40))
def test_every_element_is_met_once_and_shares_are_even(header, seed):
    draw = random.Random(seed)
    sizes = (0, 1, 2, 1023, 1024, 1025, 4096, draw.randint(1, 10**6), draw.randint(1, 10**9))
    numels = [draw.choice(sizes) for _ in range(draw.randint(1, 60))]
    most_blocks = draw.choice((1, 2, 5, 64, 528))
    stretches = walk(header, numels, most_blocks)
    check_cover(numels, stretches)
    shares = {}
    for each in stretches:
        shares[each.block] = shares.get(each.block, 0) + -(-each.numel // UNIT)
    assert max(shares.values(), default=0) - min(shares.values(), default=0) <= 1
    assert len({(each.pointer + each.block) for each in stretches}) == len(stretches)  # a slot for each piece


@pytest.mark.parametrize("most_units", [1, 4, 7])
def test_more_blocks_keep_shares_small(header, most_units):
    draw = random.Random(most_units)
    numels = [draw.choice((0, 1, 1025, draw.randint(1, 10**6))) for _ in range(50)]
    units = sum(-(-numel // UNIT) for numel in numels)
    for blocks in (5, units + 1):
        stretches = walk(header, numels, blocks, most_units=most_units, room=2 * units + 50)
        check_cover(numels, stretches)
        shares = {}
        for each in stretches:
            shares[each.block] = shares.get(each.block, 0) + -(-each.numel // UNIT)
        assert max(shares.values()) <= most_units
        assert len(shares) == min(units, max(blocks, -(-units // most_units)))


def test_tensors_beyond_32_bits_are_met_whole(header):
    numels = [5, 2**31 + 3, 7 * 2**32 + 11, 1]
    for most_blocks in (1, 528):
        check_cover(numels, walk(header, numels, most_blocks))


def test_what_no_table_holds_goes_into_the_next(header):
    many = [3] * 1009  # one more than three pointers leave room for
    stretches = walk(header, many, 528)
    check_cover(many, stretches)
    assert [sum(each.launch == launch for each in stretches) for launch in (0, 1)] == [1008, 1]
    units_of_two_tables = [2**41, 2**41, 2**41]  # 2^31 units each, and a table counts to 2^32
    stretches = walk(header, units_of_two_tables, 5)
    check_cover(units_of_two_tables, stretches)
    assert max(each.launch for each in stretches) == 2


def test_places_are_kept_however_far_apart(header):
    places = [0, 65535, 65536, 70000, 10**9]
    stretches = walk(header, [1] * 5, 1, places)
    assert [each.place for each in stretches] == places
    assert max(each.launch for each in stretches) == 2


def test_the_block_of_a_unit_is_the_one_whose_share_holds_it(header):
    draw = random.Random(0)
    for _ in range(300):
        units = draw.randint(1, 5000)
        blocks = draw.randint(1, units)
        ends = [header.share_of(units, block, blocks) for block in range(blocks + 1)]
        assert (ends[0], ends[-1]) == (0, units)
        unit = draw.randrange(units)
        block = header.block_with(unit, units, blocks)
        assert ends[block] <= unit < ends[block + 1]


def test_tables_fit_into_the_parameters_of_a_launch(header):
    assert header.parameter_bytes() <= 32764
