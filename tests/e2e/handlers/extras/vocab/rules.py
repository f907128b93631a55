def longest(words):
    return max(words.values(), key=len)
