"""Chapter 1: predictions. What a run will hold and move, said before it runs.

estimate  bytes of model states and elements moved, in closed form
"""
