"""Print the compiler's arguments for handlers in C++, to be put after the source file.

g++ -shared -fPIC my_handler.cc -o libmy_handler.so $(python -m torchere.handlers.cpp)
"""

from torchere.handlers.cpp import compile_flags

print(*compile_flags())
