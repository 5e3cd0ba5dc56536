"""Chapter 0: the exercises of each chapter: their checks, hints and mutants.

One module a chapter, `cNN`, with its exercises as `EXERCISES`.
"""
