"""python3 -m calc 'EXPRESSION' [name=value ...]"""

import json
import sys

from calc.evaluate import evaluate
from calc.tokens import CalcError

try:
    print(evaluate(sys.argv[1], {n: json.loads(v) for n, v in (word.split("=", 1) for word in sys.argv[2:])}))
except CalcError as error:
    sys.exit(f"calc: {error}")
