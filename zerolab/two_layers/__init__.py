"""Chapter 3: each idea of the course once by itself, on two layers, over torch and `comm` alone.

Owns nothing and imports nothing of the engine. One module an idea, one function a module: what
a learner writes on an empty page before building the same thing from parts. The tests of the
stages ask them for a second opinion.
"""
