// Vectors of S3D_VECTOR_BYTES bytes, by the compilers' vector extension.
//
// This file and its neighbours are compiled once per instruction set, inside a namespace of that set's name. They use
// nothing but builtins: a function of the standard library, inlined here with wide instructions, could be the copy that
// the linker keeps for the whole program, and would crash it on a lesser processor.

// Clang's shuffle takes constants only; without AVX2 a permutation is no faster than single entries.
#if defined(__clang__) || S3D_VECTOR_BYTES < 32
#define S3D_CAN_PERMUTE 0
#else
#define S3D_CAN_PERMUTE 1
#endif

#define S3D_INLINE inline __attribute__((always_inline))

template <typename T>
struct VectorOf {
    typedef T type __attribute__((vector_size(S3D_VECTOR_BYTES), aligned(sizeof(T)), may_alias));
};
template <typename T>
using Vector = typename VectorOf<T>::type;

template <typename T>
constexpr int lanes = S3D_VECTOR_BYTES / sizeof(T);

template <typename T>
S3D_INLINE Vector<T> load(const T* from) {
    return *reinterpret_cast<const Vector<T>*>(from);
}

template <typename T>
S3D_INLINE void store(T* to, Vector<T> value) {
    *reinterpret_cast<Vector<T>*>(to) = value;
}

template <typename T>
S3D_INLINE Vector<T> broadcast(T value) {
    return value - Vector<T>{};
}

// The integers of the same size, which comparisons return.
template <typename T>
using Integers = Vector<Integer<T>>;

template <typename T>
S3D_INLINE Vector<T> select(Integers<T> condition, Vector<T> yes, Vector<T> no) {
    return reinterpret_cast<Vector<T>>((condition & reinterpret_cast<Integers<T>>(yes)) |
                                       (~condition & reinterpret_cast<Integers<T>>(no)));
}

// Of a NaN in `a`, a NaN; also from `maximum` and `absolute`.
template <typename T>
S3D_INLINE Vector<T> minimum(Vector<T> a, Vector<T> b) {
    return select<T>(a > b, b, a);
}

template <typename T>
S3D_INLINE Vector<T> maximum(Vector<T> a, Vector<T> b) {
    return select<T>(a < b, b, a);
}

template <typename T>
S3D_INLINE Vector<T> absolute(Vector<T> a) {
    return select<T>(a < 0, -a, a);
}
