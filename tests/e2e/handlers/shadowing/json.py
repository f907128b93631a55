MINE = "the json of the archive"
