"""The record of a run: phases and epochs, the folder that holds its files, and a run read from them."""
