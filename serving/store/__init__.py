"""Archives on disk: look-up, download, unpacking and removal.

model store: the folder of archives that the operator configures (`model_store`).
claim: a lock on a temporary folder, which shows other servers that the folder is in use (`scratch.py`).
link: a hard link to a weights file that several versions share (`shared_weights.py`).
"""
