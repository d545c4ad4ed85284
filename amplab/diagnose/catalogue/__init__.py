"""The catalogue of findings: for each id its title, severities, sentences and remedies, and what it supersedes.

A rule decides *whether* a finding applies and supplies the numbers. What the finding says, how severe it is, and which
other findings it replaces is written here, once:

    finding("window-too-short", api=run.api, evidence={...}, new_window="1000")

`CATALOGUE` is that table; `python -c "from amplab.diagnose import CATALOGUE; print(CATALOGUE)"` prints it. Fields in
braces are filled in as by `str.format`, from the evidence and from what the rule adds; `{share:percent}` is a share.
Where the code of a remedy depends on the op, the rule passes it as the field `code`; it comes from `remedies.float32`.

    entry           what an entry has, and the catalogue as a mapping
    table           all entries, and `finding`
    shared_texts    code and sentences of several subjects

Every other file has the entries of one subject: a run, ranks, gradients, parameters, values that are not finite, values
at the limits of float16, speed, steps that raised.
"""

from amplab.diagnose.catalogue.entry import Case, Catalogue, CatalogueEntry
from amplab.diagnose.catalogue.table import CATALOGUE, finding

__all__ = ["CATALOGUE", "Case", "Catalogue", "CatalogueEntry", "finding"]
