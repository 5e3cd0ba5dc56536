"""Chapter 1: predictions. What a run will hold and move, said before it runs.

estimate  bytes of states, activations and temporaries, elements moved, all in closed form
"""
