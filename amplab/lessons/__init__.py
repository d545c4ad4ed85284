"""The lessons' own part: what a notebook shows beside the library, and the checks of its exercises.

    exercises    the decorator of a check, its verdict
    forms        the form of an answer: a number, a dict of dtypes
    progress     which exercises are solved, in a file that `amplab lab` names
    lesson_NN    data, drawings and checks of one lesson

A lesson is a notebook in ``notebooks``; its module here has the same number. The widget of the lessons,
`Explorable`, is in :mod:`amplab.views`, the charts are in :mod:`amplab.display.charts`.
"""

__all__: list[str] = []
