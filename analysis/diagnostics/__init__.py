"""What else a grid's history tells: training's health, interference, overfitting, what choices are worth."""
