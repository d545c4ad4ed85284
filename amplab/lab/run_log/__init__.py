"""A run on disk while it happens: JSON lines, append-only, readable after a kill.

    {"amplab_run": 4, "amplab": "0.1.0", "started": "…", "config": "amplab/1 task=digits …", "columns": ["step", …]}
    [0,2.31,65536.0,65536.0,false,null,"O1",null,0.0021,null,-5.0]
    {"event": "config", "step": 120, "config": "amplab/1 task=digits model=mlp opt_level=O2"}

The first line is the header. Of several processes that train together each writes a log of its own, see `ranks`, and
the header also has "rank", "world_size", "launch" and "held": the process locks its log while it writes it. An array is
a step, in the order of "columns". An object is an event: a changed config, an injection, a finding, why a step was
skipped, a histogram of the gradients, the bytes that training holds, a restart, or the scales of a step whose backwards
had different ones; of one rank of several also its state, to compare the ranks, and "end", that the log was closed;
among them are checksums of the lines before them, see `checksums`.
Every line is valid JSON: NaN and inf are the words "nan", "inf" and "-inf", and a missing loss is null (up to format 2
it was "nan" too). A step takes about 96 bytes: a million steps are 96 MB, a histogram of the gradients adds 200 bytes
and 50 for each parameter.

The files, by part::

    the format       header, step_lines, event_lines, checksums, json_lines (what they share)
    where logs are   paths
    writing          writer (`RunLog`), lock (whether its process lives)
    reading          reader (`load_run`), run (`Run`, what is read), ranks (the logs of several ranks as one run)
"""

from amplab.lab.run_log.header import FORMAT, launch_of
from amplab.lab.run_log.paths import check_writable, create_free, free_path, new_path, runs_directory
from amplab.lab.run_log.reader import load_run
from amplab.lab.run_log.run import Run
from amplab.lab.run_log.writer import FLUSH_SECONDS, MOST_WAITING, RunLog

__all__ = [
    "FLUSH_SECONDS",
    "FORMAT",
    "MOST_WAITING",
    "Run",
    "RunLog",
    "check_writable",
    "create_free",
    "free_path",
    "launch_of",
    "load_run",
    "new_path",
    "runs_directory",
]
