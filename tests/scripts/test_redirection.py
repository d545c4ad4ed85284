"""Replaced names are restored, the last one first."""

from amplab.scripts.redirection import ReplacedNames


class Base:
    own = "base"


class Derived(Base):
    other = "derived"


def test_the_last_replacement_is_undone_first():
    replaced = ReplacedNames()
    for value in ("a", "b"):
        replaced.replace(Derived, "other", value)
    assert Derived.other == "b"
    replaced.restore()
    replaced.restore()
    assert Derived.other == "derived"


def test_inherited_and_missing_names_are_so_again():
    replaced = ReplacedNames()
    replaced.replace(Derived, "own", "new")
    replaced.replace(Derived, "missing", 1)
    assert (Derived.own, Derived.missing, Base.own) == ("new", 1, "base")
    replaced.restore()
    assert set(vars(Derived)) & {"own", "missing"} == set()
    assert Derived.own == "base"
