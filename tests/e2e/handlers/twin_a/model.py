NAME = "twin a"
