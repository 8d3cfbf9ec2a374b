"""python -m dist_moe"""

from .cli import main

if __name__ == "__main__":
    main()
