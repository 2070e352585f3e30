"""The colours of plots."""

# Okabe and Ito's colours, told apart with any colour vision; without the yellow, which is too light on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
GREY = "#666666"
