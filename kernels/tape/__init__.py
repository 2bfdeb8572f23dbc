"""Operations of float32 tensors in a row, which one compiled call carries out: see :mod:`gpubuf.tape`.

An operation is a record of :data:`FIELDS` int64 in a table. It says where its tensors are: in a *slot*, which holds an
address, and at how many bytes from it. So memory may move without a new table. ``A`` and ``B`` are what it reads.

Elementwise operations go through ``SIZES`` elements, in three dimensions, with strides in elements. The last stride of
``OUT`` is 1. Products of matrices are ``COUNT`` calls of BLAS's ``sgemm``, or one of its ``sgemm_batch``: PyTorch calls
these functions too. Fortran takes the addresses of its arguments: those of fields. Products of few rows, or of few
inner elements, have a loop of our own, which is several times as fast. So have those that AMD's processors compute in
tiles, with the bias and the ReLU after them.
"""

# Fields. Of OUT, A and B: the slot, then the bytes.
OPERATION, OUT, A, B = 0, 1, 3, 5
SIZES, OUT_STRIDES, A_STRIDES, B_STRIDES, NUMBER = 7, 10, 13, 16, 19
COUNT, STEPS, ROWS, COLUMNS, INNER, TRANSPOSED_A, TRANSPOSED_B, LEADING_A, LEADING_B, LEADING_OUT, ONE, BETA, GROUPS = (
    7, 8, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21,
)  # fmt: skip
# Of a short product: strides of A down and right, of B down, of OUT down and right; whether sums round once with the
# factors that they add. B's columns are side by side.
STRIDES, FUSED = 14, 19
# Of a tiled product: strides of A down and right, of B down and right; whether there is a bias, and bytes between those
# of two products; whether numbers below 0 become 0.
POSITIVE, HAS_ADDED, ADDED_STEP = 19, 20, 21
PARTS = 10
# What a tiled product adds to all rows.
ADDED = 22
FIELDS = 24

#: Elements that are worked on at a time, in the first cache, where a result takes the place of what it is computed of.
TILE = 2048

#: Columns of a tile of a product, and inner elements of a sum: those of the next ones are added to it.
WIDTH, DEPTH = 32, 128

# Operations; NUMBER is the bits of a float64.
PRODUCT = 0
PRODUCTS = 1  # at once
SHORT_PRODUCT = 2
TILED_PRODUCT = 3
SUM = 4  # of A over the middle one of SIZES, as the sum of PARTS sums of every PARTS-th row; OUT has the other two
COPY = 5  # A; elementwise from here on
FILL = 6  # the number
RELU = 7  # max(A, 0)
RELU_GRADIENT = 8  # A where B > 0, else 0
ADD = 9  # A + B
SUBTRACT = 10  # A - B
MULTIPLY = 11  # A B
ADD_NUMBER = 12  # A plus the number
MULTIPLY_BY_NUMBER = 13  # A times the number
ADD_RELU = 14  # max(A + B, 0), where OUT is A


def tiled_room(rows: int, inner: int, columns: int) -> int:
    """Bytes that a tiled product needs: for a panel, and for a product without the rows and columns of zeros."""
    return 4 * (DEPTH * WIDTH + (rows + columns) * inner + rows * columns)
