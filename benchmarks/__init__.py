"""Each claim of speed or endurance as a script that measures it; ``scripts/bench`` lists them."""
