"""Chapter 1: predictions. What a run will hold and move, said before it runs.

shapes    a GPT of about so many parameters, for who knows only how many
estimate  bytes of states, activations and temporaries, elements moved, all in closed form
"""
