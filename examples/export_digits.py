"""Writes digits.bin from scikit-learn's copy of the digits of Alpaydin and Kaynak (UCI, CC BY 4.0).

1,797 records of 65 bytes: 8 x 8 pixels of 0 to 16, then the digit. The file is committed; this
shows where it comes from.
"""

from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

digits = load_digits()
records = np.column_stack([digits.data, digits.target]).astype(np.uint8)
Path(__file__).with_name("digits.bin").write_bytes(records.tobytes())
