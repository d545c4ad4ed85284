"""Opens JupyterLab on one lesson: on this machine only, behind its token, with nothing downloaded.

    lesson_list what `amplab lab --list` prints
    lessons     the working copies of the notebooks, which the person may change
    server      the command line and the environment of JupyterLab
    beside      the modules in the folder of a notebook, which its kernel could import
    kernel      the start of the kernel, which imports from that folder from its first cell on
    trust       the part of its server that signs unchanged lessons
    contents    the part of its server that reads notebooks, without the saved widgets of one that is not signed
    jupyter     its default settings; its kernel; a prebuilt extension that opens the lab when its lesson opens
    ranks       several processes that train together, by torchrun; not about JupyterLab

Standard library only, so that JupyterLab does not wait for torch. The dashboard itself is in :mod:`amplab.views`.
"""

from amplab.launch.lesson_list import lesson_rows, lesson_table
from amplab.launch.lessons import (
    LaunchError,
    WorkingCopies,
    choose_lesson,
    copy_lessons,
    find_lessons,
    lessons_directory,
    progress_file,
)
from amplab.launch.ranks import LaunchStopped, RankEnd, end_with_launcher, launch_ranks
from amplab.launch.server import Launch, launch, plan_launch

__all__ = [
    "LaunchError",
    "WorkingCopies",
    "find_lessons",
    "choose_lesson",
    "lessons_directory",
    "lesson_rows",
    "lesson_table",
    "progress_file",
    "copy_lessons",
    "Launch",
    "plan_launch",
    "launch",
    "end_with_launcher",
    "launch_ranks",
    "LaunchStopped",
    "RankEnd",
]
