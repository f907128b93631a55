NAME = "twin b"
